// h3.family: the words in which the page speaks of a job of either family.
(() => {
  const isLtx = (job) => job.family === 'ltx';
  const stages = () => h3.families.ltx.stages;
  const recipe = () => stages().join(' + ');

  const steps = (job) => (isLtx(job) ? `${recipe()} steps` : `${job.steps} step${job.steps === 1 ? '' : 's'}`);
  const frames = (job) => `${job.frames} frame${job.frames === 1 ? '' : 's'}` + (isLtx(job) ? ` at ${job.fps} fps` : '');
  // LTX's recipe has one way of sampling, which needs no name.
  const sampling = (job) => (isLtx(job) ? '' : `${job.sampler} ${job.scheduler}`);

  // A step of LTX by its stage: {stage, step, of} of the `done` of both; the second begins only
  // when its size is told, as the latents are doubled in between.
  function stepOf(done, detail) {
    const [first, second] = stages(), later = done > first || /^stage 2/.test(detail || '');
    return later ? { stage: 2, step: done - first, of: second } : { stage: 1, step: done, of: first };
  }

  // How far a job is, without the name of the stage: "step 3 of 12", "stage 1 at 64×64, step 3 of 8".
  function progress(job) {
    const share = job.total >= 100000 ? `${Math.floor(100 * job.done / job.total)} %` : `${job.done} of ${job.total}`;
    if (job.stage !== 'denoise') return share;
    if (!isLtx(job)) return `step ${share}`;
    const at = stepOf(job.done, job.detail), size = (job.detail || '').split(', ')[1];
    return `stage ${at.stage}${size ? ' at ' + h3.sized(size) : ''}, step ${at.step} of ${at.of}`;
  }

  // What the mp4 of an LTX run says of itself besides "AI-generated", from the run's record.
  function provenance(run) {
    const found = (run.engine && run.engine.resolved) || {}, plan = run.plan || {};
    const licence = found.license ? `licence of the weights: ${found.license}` : '';
    return [h3.families.ltx.title, licence, plan.v2a_source ? `v2a_source ${plan.v2a_source}` : ''].filter(Boolean).join(' · ');
  }

  h3.family = { isLtx, recipe, steps, frames, sampling, progress, stages, provenance };
})();

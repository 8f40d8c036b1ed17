// A against B: the request of the form on two plans, and the pairs queued from here.
function pairView(root, editor) {
  const q = (s) => root.querySelector(s);
  const KEPT = 6;
  let busy = false, plans = [];

  function say(text) {
    h3.write(q('.ly-pair-alert'), text);
    q('.ly-pair-alert').hidden = !text;
  }

  // One that this machine can run the same request on; A again, its noise, where there is none.
  function another(a) {
    const family = (plans.find((plan) => plan.name === a) || { fields: {} }).fields.family;
    const found = plans.find((plan) => plan.runs && plan.name !== a && plan.fields.family === family);
    return found ? found.name : a;
  }

  function choice() {
    const kept = h3.state('layout.pair') || {};
    const names = plans.filter((plan) => plan.fields && plan.fields.family === h3.draft.get().family).map((plan) => plan.name);
    const a = names.includes(kept.a) ? kept.a : h3.draft.get().plan;
    const b = names.includes(kept.b) ? kept.b : another(a);
    h3.fill(q('.ly-a'), names, a);
    h3.fill(q('.ly-b'), names, b);
    between();
  }

  function between() {
    const a = editor.named(q('.ly-a').value), b = editor.named(q('.ly-b').value);
    if (a && b) editor.listed(q('.ly-between'), editor.differences(a.fields, b.fields), a === b ? 'the same plan twice: only noise of the clock' : 'the plans do not differ');
  }

  function request() {
    const d = h3.draft.get();
    if (h3.family.isLtx(d)) {
      h3.write(q('.ly-request'), `${d.ltx_width}x${d.ltx_height}, ${d.ltx_frames} frames at ${d.ltx_fps} fps, ${h3.family.recipe()} steps, seed ${d.seed}${d.ltx_image ? ', first frame ' + d.ltx_image.name : ''}: ${d.prompt || 'no prompt'}`);
      return;
    }
    const count = d.references.length;
    h3.write(q('.ly-request'), `${d.width}x${d.height}, ${d.frames} frames, ${d.steps} steps, seed ${d.seed}, ${count} reference${count === 1 ? '' : 's'}: ${d.prompt || 'no prompt'}`);
  }

  async function queue() {
    if (busy) return;
    busy = true;
    q('.ly-both').disabled = true;
    say('');
    try {
      const body = { request: h3.form(), plans: [q('.ly-a').value, q('.ly-b').value], keep_latents: true };
      if (q('.ly-forced').checked) body.force = true;
      const { jobs } = await h3.licence.guarded(body.plans, () => h3.api('/jobs', { method: 'POST', body }));
      const pairs = h3.state('layout.pairs') || [];
      h3.state('layout.pairs', [jobs.map((job) => job.id), ...pairs].slice(0, KEPT));
      q('.ly-force').hidden = true;
      q('.ly-forced').checked = false;
      h3.jobs.refresh();
    } catch (error) {
      say(error.message);
      if (/with force\./.test(error.message)) q('.ly-force').hidden = false;
    } finally {
      busy = false;
      q('.ly-both').disabled = false;
      pairs();
    }
  }

  function side(letter, job) {
    const pill = h3.make('span', 'pill', job.state);
    pill.dataset.state = job.state;
    const node = h3.make('div', 'ly-side', '', h3.make('span', 'ly-letter', letter), h3.make('span', 'ly-side-plan', job.plan), pill);
    if (job.state === 'running' && job.stage) node.append(h3.make('span', 'ly-reason', job.stage + (job.total > 1 ? ` ${job.done} of ${job.total}` : '')));
    if (job.state === 'done') node.append(h3.make('span', 'ly-reason', h3.seconds(job.ended - job.started)));
    if (job.state === 'failed') node.append(h3.make('span', 'ly-reason', job.reason));
    return node;
  }

  function pairs() {
    const rows = (h3.state('layout.pairs') || []).map((ids) => ids.map((id) => h3.jobs.get(id))).filter((jobs) => jobs.every(Boolean));
    q('.ly-pairs').replaceChildren(...rows.map(([a, b]) => {
      const row = h3.make('li', 'ly-pair', '', side('A', a), side('B', b));
      if (a.state === 'done' && b.state === 'done') row.append(h3.button('quiet ly-compare', 'Compare', 'Compare these two runs', () => h3.go('runs', `${a.id}..${b.id}`)));
      return row;
    }));
  }

  for (const s of ['.ly-a', '.ly-b']) {
    q(s).addEventListener('change', () => { h3.state('layout.pair', { a: q('.ly-a').value, b: q('.ly-b').value }); between(); });
  }
  q('.ly-both').addEventListener('click', queue);
  h3.on('jobs', pairs, root);
  h3.on('draft', ({ changed }) => { if (changed.includes('family')) choice(); request(); }, root);
  request();
  pairs();
  return { plans: (next) => { plans = next; choice(); } };
}

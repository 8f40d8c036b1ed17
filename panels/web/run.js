// One run in full: player, prompt, facts, notes, stages, and what can be done with it.
const ENDED = ['done', 'failed', 'cancelled', 'interrupted'];
const STATE_WORDS = { queued: 'waiting', running: 'running', cancelling: 'stopping', done: 'done', failed: 'failed', cancelled: 'cancelled', interrupted: 'interrupted' };

const runPath = (id, rest) => '/runs/' + encodeURIComponent(id) + (rest || '');

function badge(state) {
  const node = h3.make('span', 'state', STATE_WORDS[state] || state);
  node.dataset.state = state;
  return node;
}

function duration(job) {
  if (!job.started) return '';
  const end = job.ended || (ENDED.includes(job.state) ? 0 : Date.now() / 1000);
  return end ? h3.seconds(Math.max(0, end - job.started)) : '';
}

function link(text, href, file) {
  const node = h3.make('a', 'quiet', text);
  node.href = href;
  node.download = file;
  return node;
}

function pairsOf(rows) {
  return rows.filter(([, value]) => value !== '' && value !== null && value !== undefined)
    .flatMap(([name, value]) => [h3.make('dt', '', name), value instanceof Node ? h3.make('dd', '', '', value) : h3.make('dd', '', String(value))]);
}

function runView(root, fail, gone) {
  const find = (s) => root.querySelector(s);
  let id = '', run = null;

  async function load() {
    try {
      const job = await h3.api('/jobs/' + encodeURIComponent(id));
      const missing = await h3.load(job.request, { plan: run.job.plan });
      if (missing.length) fail(new Error('no longer on this console: ' + missing.join(', ') + '; add the files again'));
    } catch (error) { fail(error); }
  }

  async function redo() {
    try {
      await h3.licence.guarded([run.job.plan], () => h3.api('/jobs/' + encodeURIComponent(id) + '/duplicate', { method: 'POST' }));
      h3.go('generate');
    } catch (error) { fail(error); }
  }

  async function remove() {
    try {
      await h3.api(runPath(id), { method: 'DELETE' });
      gone(id);
    } catch (error) { ask(false); fail(error); }
  }

  function ask(on) {
    find('.rv-ask').hidden = !on;
    if (on) find('.rv-no').focus();
  }

  function tools(job) {
    const ended = ENDED.includes(job.state), file = '/api/v1' + runPath(job.id);
    const nodes = [];
    if (job.kind === 'generate') {
      nodes.push(h3.button('quiet', 'Load into form', '', load), h3.button('quiet', 'Redo', 'Queue it again as it is', redo));
      nodes.push(h3.button('quiet', 'Timing', '', () => h3.go('timing', job.id)));
    } else {
      nodes.push(h3.button('quiet', 'Parity report', '', () => h3.go('parity', job.id)));
    }
    if (job.video) nodes.push(link('Save mp4', file + '/video', job.id + '.mp4'));
    if (run.latents) nodes.push(link('Latents', file + '/latents', job.id + '_latents.safetensors'));
    if (ended) nodes.push(link('Export zip', file + '/export', job.id + '.zip'));
    if (ended || job.state === 'queued') nodes.push(h3.button('quiet danger rv-delete', 'Delete', '', () => ask(true)));
    find('.tools').replaceChildren(...nodes);
  }

  function screen(job) {
    const video = find('video'), image = find('.rv-preview');
    const url = job.video ? new URL(job.video, location.href).href : '';
    if (url && video.src !== url) video.src = url;
    if (!url && video.hasAttribute('src')) { video.removeAttribute('src'); video.load(); }
    video.hidden = !url;
    image.hidden = !!url || !job.preview;
    if (!image.hidden && image.dataset.step !== job.preview + job.done) { image.dataset.step = job.preview + job.done; image.src = job.preview; }
    const empty = find('.stage-empty');
    empty.hidden = !!url || !image.hidden;
    h3.write(empty, job.kind === 'parity' ? 'A parity run makes no video.' : ENDED.includes(job.state) ? 'No video: this run is ' + STATE_WORDS[job.state] + '.' : 'The video appears here when it is done.');
    find('.rv-screen').style.aspectRatio = job.width ? job.width + ' / ' + job.height : '16 / 9';
  }

  function facts(job) {
    const going = ENDED.includes(job.state) ? '' : [job.stage, job.total > 1 ? h3.family.progress(job) : ''].filter(Boolean).join(', ');
    const parent = job.parent ? h3.button('rv-link', job.parent, '', () => h3.go('runs', job.parent)) : '';
    find('.rv-facts').replaceChildren(...pairsOf([
      ['State', badge(job.state)], ['Progress', going], ['Made', h3.when(job.created)], ['Took', duration(job)], ['Plan', job.plan],
      ['Model', h3.families[job.family] && job.kind === 'generate' ? h3.families[job.family].title : ''],
      ['Marked', h3.family.isLtx(job) && job.video ? 'AI-generated · ' + h3.family.provenance(run) : ''], ['By', job.mine ? '' : job.owner], ['Made from', parent], ['Id', job.id],
    ]));
  }

  function references(job) {
    const items = (job.references || []).map((reference) => {
      const li = h3.make('li');
      if (reference.media && reference.kind !== 'audio') {
        const image = h3.make('img');
        image.src = '/api/v1/media/' + encodeURIComponent(reference.media) + '/thumb';
        image.alt = '';
        image.addEventListener('error', () => image.remove());
        li.append(image);
      }
      li.append(h3.make('span', '', reference.kind + ': ' + reference.name));
      return li;
    });
    find('.rv-refs').hidden = !items.length;
    find('.rv-refs ol').replaceChildren(...items);
  }

  async function times(job) {
    const box = find('.rv-times');
    if (job.kind !== 'generate' || !job.started) { box.hidden = true; return; }
    const found = await h3.api(runPath(job.id, '/timings'));
    if (job.id !== id) return;
    const rows = found.columns.map(([name, x]) => tableRow(name, [[exact(x), x === null ? 'soft' : '']]));
    rows.push(tableRow('peak memory', [[memory(found.peak_memory_bytes), found.peak_memory_bytes ? '' : 'soft']]));
    box.querySelector('tbody').replaceChildren(...rows);
    box.hidden = false;
    find('.rv-plan-facts').replaceChildren(...pairsOf(Object.entries(found.conditions)));
  }

  function draw() {
    const job = run.job;
    root.dataset.run = job.id;
    root.dataset.state = job.state;
    tools(job);
    screen(job);
    h3.write(find('.rv-prompt'), job.prompt || (job.kind === 'parity' ? (run.task.goldens || []).join(', ') : 'No prompt'));
    h3.write(find('.rv-reason'), job.state === 'done' ? '' : job.reason);
    find('.rv-reason').hidden = job.state === 'done' || !job.reason;
    find('.rv-shape').replaceChildren(...chips(job.kind === 'generate' ? shapeWords({ ...job, references: [] }) : []));
    facts(job);
    references(job);
    const notes = (run.notes || []).map((note) => h3.make('li', note.warning ? 'warn' : '', h3.sized(note.text)));
    find('.rv-notes').hidden = !notes.length;
    find('.rv-notes ul').replaceChildren(...notes);
  }

  async function show(wanted, anew) {
    if (wanted === id && run && !anew) return;
    if (wanted !== id) ask(false);
    id = wanted;
    try {
      const found = await h3.api(runPath(id));
      if (wanted !== id) return;
      run = found;
      draw();
      await times(found.job);
    } catch (error) {
      if (wanted !== id) return;
      id = root.dataset.run = ''; // nothing of the run shown before stands under the reason
      find('.tools').replaceChildren();
      fail(error);
    }
  }

  // A moving job: its progress without asking again; all of it once it has ended.
  function update(job) {
    if (!run || job.id !== id) return;
    const same = job.state === run.job.state;
    run.job = job;
    if (same) { facts(job); screen(job); } else show(id, true);
  }

  function close() {
    id = '';
    run = null;
    find('video').pause();
  }

  find('.rv-yes').addEventListener('click', remove);
  find('.rv-no').addEventListener('click', () => ask(false));
  find('.rv-ask').addEventListener('keydown', (event) => { if (event.key === 'Escape') ask(false); });
  return { show, update, close };
}

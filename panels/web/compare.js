// Two runs: their players, the settings that differ, times and latents of B against A.
const FIGURES = [['max_abs', 'max'], ['mean_abs', 'mean'], ['relative_l2', 'relative L2'], ['cosine', 'cosine'], ['psnr', 'PSNR']];

// More than a handful of digits only where they tell something: a cosine of 0.99999 is not 1.
function figure(name, x) {
  if (x === null) return '–';
  if (name === 'psnr') return x.toFixed(1) + ' dB';
  if (name === 'cosine') return x === 1 ? '1' : x.toFixed(7);
  return x === 0 ? '0' : x.toExponential(2);
}

function setting(value) {
  if (value === null || value === undefined) return '–';
  if (value === '') return '(empty)';
  return typeof value === 'object' ? JSON.stringify(value) : String(value);
}

function compareView(root, fail) {
  const find = (s) => root.querySelector(s);
  const pair = players(root);
  let shown = '';

  function name(side, job) {
    const box = find('.rv-name[data-side=' + side + ']');
    const link = h3.button('rv-link', job.prompt || job.kind, 'Open this run', () => h3.go('runs', job.id));
    box.replaceChildren(h3.make('b', '', side.toUpperCase()), link, h3.make('span', '', [h3.when(job.created), job.plan, job.state].join(' · ')));
  }

  function settings(rows) {
    const box = find('.rv-differ');
    box.querySelector('.scroll').hidden = !rows.length;
    box.querySelector('.tm-note').hidden = !!rows.length;
    h3.write(box.querySelector('.tm-note'), 'None: request, plan and versions are the same.');
    box.querySelector('thead').replaceChildren(tableHead(['', 'A', 'B']));
    box.querySelector('tbody').replaceChildren(...rows.map((r) => tableRow(r.section === 'request' ? r.name : r.section + ': ' + r.name, [[setting(r.a), 'wrap'], [setting(r.b), 'wrap']])));
  }

  function times(found) {
    const box = find('.rv-delta');
    box.querySelector('thead').replaceChildren(tableHead(['', 'A', 'B', 'difference', '%', 'B / A']));
    const all = [...found.times.map((t) => [t, exact]), [{ name: 'peak memory', ...found.peak_memory }, memory]];
    const neither = all.filter(([t]) => t.a === null && t.b === null).map(([t]) => t.name);
    h3.write(box.querySelector('.tm-note'), neither.length ? 'Not measured in either run: ' + neither.join(', ') + '.' : '');
    box.querySelector('tbody').replaceChildren(...all.filter(([t]) => !neither.includes(t.name)).map(([t, words]) => {
      const [b, a, ...difference] = deltaCells(t.b, t.a, words, t.name);
      const cached = fromCache(t.name, t.a, t.b) || fromCache(t.name, t.b, t.a);
      return tableRow(t.name, [a, b, ...difference, [t.ratio === null || cached ? '' : digits(t.ratio) + ' ×', '']]);
    }));
  }

  function latents(found, sameSeed) {
    const box = find('.rv-parity'), note = box.querySelector('.tm-note');
    const sides = found ? ['video', 'audio'].filter((side) => found[side]) : [];
    box.querySelector('.scroll').hidden = !sides.length;
    box.querySelector('thead').replaceChildren(tableHead(['', ...FIGURES.map(([, words]) => words)]));
    box.querySelector('tbody').replaceChildren(...sides.map((side) => {
      const it = found[side];
      if (it.equal) {
        const row = tableRow(side, [['equal, bit for bit', 'better']]);
        row.querySelector('td').colSpan = FIGURES.length;
        return row;
      }
      return tableRow(side, FIGURES.map(([key]) => [figure(key, it[key]), it[key] === null ? 'soft' : '']));
    }));
    const said = found ? [found.reason, ...sides.map((side) => found[side].reason && side + ': ' + found[side].reason)].filter(Boolean) : ['Comparing the latents …'];
    if (found && !said.length && !sameSeed) said.push('The seeds differ: these figures say nothing about parity.');
    h3.write(note, said.join('; '));
  }

  const side = (job) => (job.video ? { url: job.video, frames: job.frames, fps: job.fps || 24, width: job.width, height: job.height } : null);

  function videos(a, b) {
    pair.load(side(a), side(b));
    const without = [['A', a], ['B', b]].filter(([, job]) => !job.video).map(([letter]) => letter);
    find('.ab-none').hidden = !without.length;
    h3.write(find('.ab-none'), without.length ? without.join(' and ') + ' has no video.'.replace('has', without.length > 1 ? 'have' : 'has') : '');
    const notes = [];
    if (!without.length && a.frames !== b.frames) notes.push('A has ' + a.frames + ' frames and B ' + b.frames + '; the shorter one ends both.');
    if (!without.length && a.fps !== b.fps) notes.push('A has ' + a.fps + ' frames a second and B ' + b.fps + ': the same moment is shown, not the same frame.');
    if (!without.length && (a.width !== b.width || a.height !== b.height)) notes.push('A is ' + a.width + 'x' + a.height + ', B is ' + b.width + 'x' + b.height + '; B is fitted into A.');
    h3.write(find('.ab-note'), notes.join(' '));
  }

  async function show(a, b) {
    if (shown === a + '..' + b) return;
    shown = a + '..' + b;
    const mine = shown;
    const query = '/runs/compare?a=' + encodeURIComponent(a) + '&b=' + encodeURIComponent(b);
    root.dataset.refused = 'no';
    try {
      const [runA, runB] = await Promise.all([a, b].map((id) => h3.api('/runs/' + encodeURIComponent(id))));
      if (mine !== shown) return;
      if (runA.job.family !== runB.job.family) {
        const title = (run) => (h3.families[run.job.family] || { title: run.job.family }).title;
        root.dataset.refused = 'yes'; // no black players under the reason
        throw new Error('Run A is of ' + title(runA) + ' and run B of ' + title(runB) + ': two model families have nothing to compare; choose two runs of one.');
      }
      const found = await h3.api(query + '&latents=false');
      if (mine !== shown) return;
      name('a', runA.job);
      name('b', runB.job);
      videos(runA.job, runB.job);
      settings(found.settings);
      times(found);
      latents(null);
      root.dataset.pair = mine;
      const whole = await h3.api(query);
      if (mine === shown) latents(whole.latents, runA.job.seed === runB.job.seed);
    } catch (error) {
      if (mine === shown) { shown = ''; fail(error); }
    }
  }

  function close() {
    shown = '';
    pair.pause();
  }

  find('.rv-swap').addEventListener('click', () => { const [a, b] = shown.split('..'); if (b) h3.go('runs', b + '..' + a); });
  return { show, close, key: pair.key };
}

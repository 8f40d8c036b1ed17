// The left side of Backends: machine, layouts, and a card per backend with what is known of it.
function backendsView(root, fail) {
  const q = (s) => root.querySelector(s);
  const SECTIONS = { attention: 'Attention', linear: 'Linear layers', elementwise: 'Elementwise steps' };
  const FORMATS = { nvfp4: 'NVFP4', fp8: 'FP8', int8: 'INT8' };

  function pair(list, name, value) {
    if (!value) return;
    list.append(h3.make('dt', '', name), h3.make('dd', '', value));
  }

  function machine(found) {
    const facts = q('.ly-facts'), m = found.machine;
    facts.replaceChildren();
    if (!m) return;
    const gpus = found.devices.filter((d) => d.device !== 'cpu');
    pair(facts, gpus.length > 1 ? 'GPUs' : 'GPU', gpus.length
      ? gpus.map((d) => `${d.name}, ${h3.bytes(d.memory_bytes)}, compute ${d.capability}`).join('; ')
      : `none: ${m.no_cuda}`);
    pair(facts, 'Processor', `${m.cpu}, ${m.cores} cores`);
    pair(facts, 'PyTorch', [m.torch, m.cuda && `CUDA ${m.cuda}`, m.cudnn && `cuDNN ${m.cudnn}`].filter(Boolean).join(', '));
    pair(facts, 'comfy-kitchen', found.kitchen && found.kitchen.version);
    pair(facts, 'Driver', m.driver);
  }

  function layouts(found) {
    const alike = new Map(); // what runs here, and what the same reason forbids
    for (const one of found.layouts) alike.set(one.reason, [...(alike.get(one.reason) || []), one]);
    q('.ly-layouts').replaceChildren(...[...alike].map(([reason, those]) => {
      const good = those[0].available;
      const row = h3.make('li', 'ly-layout', '', mark(good, good ? 'available' : 'not here'));
      if (reason) row.append(h3.make('span', 'ly-reason', reason));
      row.append(h3.make('span', 'ly-layout-names', '', ...those.map((one) => {
        const [name, gpus] = one.name.split(': ');
        const chip = h3.make('span', 'ly-layout-name', name);
        if (gpus) chip.append(h3.make('small', '', gpus));
        return chip;
      })));
      return row;
    }));
  }

  function mark(good, words) {
    const node = h3.make('span', 'pill', words);
    node.dataset.verdict = good ? 'fits' : '';
    return node;
  }

  // What a backend does on one device: its route, or the reason why it cannot run.
  function device(one) {
    const row = h3.make('li', 'ly-device', '', h3.make('span', 'ly-where', one.device === 'cpu' ? 'CPU' : one.device));
    row.append(mark(one.available, one.available ? 'available' : 'not here'));
    row.append(h3.make('span', 'ly-reason', one.available ? one.route : one.reason));
    if (one.deviation !== null) row.append(h3.make('span', 'ly-deviation', `trial: ${one.deviation.toPrecision(2)} relative to fp32`));
    return row;
  }

  function here(state) {
    const node = h3.make('span', 'pill', state.text);
    node.dataset.verdict = { good: 'fits', bad: 'no' }[state.verdict] || '';
    return node;
  }

  function card(one, open) {
    const head = h3.make('div', 'ly-name-row', '', h3.make('span', 'ly-backend-name', one.name));
    if (FORMATS[one.field]) head.append(h3.make('span', 'ly-format', FORMATS[one.field]));
    if (one.known && one.known.lossy) {
      const lossy = h3.make('span', 'pill', 'lossy');
      lossy.dataset.verdict = 'tight';
      lossy.title = one.known.lossy;
      head.append(lossy);
    }
    if (one.known && one.known.h200.includes('unvalidated')) {
      const pill = h3.make('span', 'pill ly-unvalidated', 'unvalidated on a GPU');
      pill.title = 'No golden, gate or full-size run of it on a GPU is recorded';
      head.append(pill);
    }
    const node = h3.make('article', 'ly-backend', '', head);
    node.dataset.name = one.name;
    if (one.known) node.append(h3.make('p', 'ly-words', one.known.help + (one.known.lossy ? ` Lossy: ${one.known.lossy}.` : '')));
    node.append(h3.make('ul', 'ly-devices', '', ...one.devices.map(device)));
    const list = h3.make('dl', 'ly-facts');
    pair(list, 'Needs', one.requirement);
    pair(list, 'Package', one.version ? `${one.package} ${one.version}` : `${one.package}, not installed`);
    if (one.known) {
      const where = h3.make('dl', 'ly-facts');
      pair(where, 'CPU goldens', word(one.known.cpu));
      pair(where, 'One H200', word(one.known.h200));
      node.append(where);
    }
    if (one.here) {
      const row = h3.make('div', 'ly-here');
      if (!one.here.text.includes('this machine')) row.append(h3.make('span', 'ly-where', 'On this machine'));
      row.append(here(one.here));
      if (one.here.last) row.append(h3.make('span', 'ly-reason', 'last ' + h3.when(one.here.last)));
      node.append(row);
      if (one.here.gate) node.append(gate(one.here));
    }
    if (open) node.append(ofLtx(one, open));
    node.append(h3.make('details', 'more ly-needed', '', h3.make('summary', '', 'What it needs'), list));
    return node;
  }

  // Attention that LTX's plans may name; the others are closed for it until they pass its gate.
  function ofLtx(one, open) {
    const shut = h3.make('span', 'pill', open.includes(one.name) ? 'open' : 'closed');
    shut.dataset.verdict = open.includes(one.name) ? 'fits' : '';
    const row = h3.make('div', 'ly-here ly-ltx', '', h3.make('span', 'ly-where', h3.families.ltx.title), shut);
    if (!open.includes(one.name)) row.append(h3.make('span', 'ly-reason', 'not validated on LTX yet'));
    return row;
  }

  // What `launch.py gate` last said of it on this machine.
  function gate(state) {
    const said = h3.make('span', 'pill', state.gate);
    said.dataset.verdict = { passed: 'fits', failed: 'no' }[state.gate_status] || '';
    return h3.make('div', 'ly-here ly-gate', '', h3.make('span', 'ly-where', 'Gate'), said);
  }

  // In a narrow window the plan comes below the cards, so there they are folded.
  const wide = window.innerWidth > 1040, opened = new Set(wide ? Object.keys(SECTIONS) : []);

  function section(key, title, list, open) {
    const able = list.filter((one) => one.devices.some((d) => d.available)).length;
    const node = h3.make('details', 'more ly-section', '', h3.make('summary', '', '', h3.make('span', 'ly-title', title),
      h3.make('span', 'ly-when', `${able} of ${list.length} can run here`)), h3.make('div', 'ly-grid', '', ...list.map((one) => card(one, open))));
    node.open = opened.has(key);
    node.addEventListener('toggle', () => (node.open ? opened.add(key) : opened.delete(key)));
    return node;
  }

  // The names that a field of LTX's plans may have; null where every name may.
  function ltxValues(found, key) {
    const field = found.fields.find((it) => it.name === key && it.ltx_values.length);
    return field ? field.ltx_values : null;
  }

  const word = (text) => (text === '-' || !text ? 'none' : text);

  function draw(found) {
    machine(found);
    layouts(found);
    h3.write(q('.ly-when'), found.running ? 'probing …' : found.probed ? 'probed ' + h3.when(found.probed) : 'not probed yet');
    q('.ly-again').disabled = found.running || !(h3.session && h3.session.admin);
    const wait = q('.ly-wait');
    wait.hidden = !!found.machine;
    h3.write(wait, found.running ? 'Every backend is tried on every device. This takes some seconds.'
      : 'This machine is probed as soon as no job runs.');
    if (found.reason) fail(found.reason);
    const problems = found.problems || [];
    q('.ly-problems').hidden = !problems.length;
    q('.ly-problems').replaceChildren(...problems.map((text) => h3.make('li', '', text)));
    q('.ly-sections').replaceChildren(...Object.entries(SECTIONS).filter(([key]) => found[key].length).map(([key, title]) => section(key, title, found[key], ltxValues(found, key))));
  }

  q('.ly-again').addEventListener('click', async () => {
    try {
      fail('');
      draw(await h3.api('/backends/probe', { method: 'POST' }));
    } catch (error) {
      fail(error.message);
    }
  });
  return { draw };
}

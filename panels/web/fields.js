// The fields of a plan: the first group is open, the others fold and say in one line what is not as by default.
function planFields(box, changed) {
  const opened = new Set();
  let found = null, values = null, base = null, typed = {};

  const shown = (value) => (value === true ? 'on' : value === false ? 'off' : value === '' ? 'empty' : String(value));

  const ltx = () => values.family === 'ltx';
  const asByDefault = (it) => values[it.name] === (ltx() ? it.ltx_default : it.default);
  const CLOSED = 'not validated on LTX yet'; // as the engine refuses it (runtime/messages.py)

  // Allowed values of a field: its own, or the backends of that field; with why one cannot run, and
  // why it is closed for the plan's family.
  function choices(it) {
    const own = ltx() && it.ltx_values.length ? it.ltx_values : null;
    const list = every(it).map((one) => ({ ...one, closed: own && !own.includes(one.name) ? CLOSED : '' }));
    return it.backends ? list : list.filter((one) => !one.closed);
  }

  function every(it) {
    if (!it.backends) return (ltx() && it.ltx_values.length ? it.ltx_values : it.values).map((name) => ({ name, reason: '', help: '', lossy: it.lossy.includes(name) }));
    const own = found[it.kind].filter((one) => [one.field, ...(one.also || [])].includes(it.backends));
    const place = values.device === 'cuda' ? 'cuda:0' : 'cpu';
    const list = own.map((one) => {
      const there = one.devices.find((d) => d.device === place), known = one.known || { help: '', lossy: '' };
      return { name: one.name, reason: there ? there.reason : '', help: known.help, lossy: known.lossy };
    });
    if (!list.some((one) => one.name === values[it.name])) list.push({ name: values[it.name], reason: '', help: '', lossy: '' });
    return list;
  }

  const isNumber = (it) => it.kind === 'number' || it.kind === 'whole number';
  const chosen = (it) => (isNumber(it) || it.kind === 'text' || it.kind === 'switch' ? null : choices(it).find((one) => one.name === values[it.name]));

  // A number that cannot be kept stays as it was typed, with the sentence that says why.
  function number(it, input) {
    const value = Number(input.value), whole = it.kind === 'whole number';
    const good = input.value.trim() !== '' && value >= it.least && value <= it.most && (!whole || Number.isInteger(value));
    delete typed[it.name];
    if (good) values[it.name] = value;
    else {
      const got = input.value.trim() || 'no number';
      typed[it.name] = { text: input.value, reason: `${it.title} must be a ${it.kind} from ${it.least} to ${it.most}, got ${got}.` };
    }
    changed();
  }

  function set(name, value) {
    values[name] = value;
    changed();
  }

  function control(it) {
    if (it.kind === 'switch') {
      const box = h3.make('input');
      box.type = 'checkbox';
      box.checked = values[it.name];
      box.addEventListener('change', () => set(it.name, box.checked));
      return box;
    }
    if (isNumber(it)) {
      const input = h3.make('input');
      input.inputMode = it.kind === 'number' ? 'decimal' : 'numeric';
      input.autocomplete = 'off';
      input.value = typed[it.name] ? typed[it.name].text : values[it.name];
      input.addEventListener('change', () => number(it, input));
      return input;
    }
    if (it.kind === 'text') {
      const input = h3.make('input');
      input.autocomplete = 'off';
      input.spellcheck = false;
      input.value = values[it.name];
      input.addEventListener('change', () => set(it.name, input.value.trim()));
      return input;
    }
    const select = h3.make('select');
    for (const one of choices(it)) {
      const words = [one.name, one.lossy ? 'lossy' : '', one.closed ? 'closed for LTX' : one.reason ? 'not here' : ''].filter(Boolean);
      const option = new Option(words.join(' · '), one.name);
      option.disabled = !!one.closed;
      select.append(option);
    }
    select.value = values[it.name];
    select.addEventListener('change', () => set(it.name, select.value));
    return select;
  }

  // What is wrong with a field as it stands, "" for nothing.
  function wrong(it) {
    if (typed[it.name]) return typed[it.name].reason;
    if (it.name === 'device' && values.device === 'cuda' && found.machine && !found.devices.some((d) => d.device === 'cuda:0')) {
      return `Not here: ${found.machine.no_cuda}.`;
    }
    const one = chosen(it);
    return one && one.reason ? `Not here: ${one.reason}.` : '';
  }

  function help(it) {
    const one = chosen(it);
    const lossy = one && one.lossy && it.backends ? `Lossy: ${one.lossy}.` : '';
    const closed = one && it.backends ? choices(it).filter((other) => other.closed).map((other) => other.name) : [];
    const shut = closed.length ? `Closed for LTX, ${CLOSED}: ${closed.join(', ')}.` : '';
    return [it.help, one ? one.help : '', lossy, shut].filter(Boolean).join(' ');
  }

  function row(it) {
    const node = h3.make('label', it.kind === 'switch' ? 'check ly-switch' : 'f');
    const input = control(it), title = h3.make('span', '', it.title), one = chosen(it), reason = wrong(it);
    input.dataset.plan = it.name;
    if (one && one.lossy) {
      const pill = h3.make('span', 'pill ly-lossy', 'lossy');
      pill.dataset.verdict = 'tight';
      title.append(' ', pill);
    }
    node.append(...(it.kind === 'switch' ? [input, title] : [title, input]));
    node.append(h3.make('small', 'ly-help' + (reason ? ' bad' : ''), reason || help(it)));
    if (base && values[it.name] !== base[it.name]) node.classList.add('changed');
    if (typed[it.name]) node.classList.add('wrong');
    return node;
  }

  // A field of another field's value is there while it means something, or is not as by default.
  const meant = (it) => !it.of || it.of_values.includes(values[it.of]) || !asByDefault(it) || typed[it.name];

  function group(title, fields) {
    const grid = h3.make('div', 'ly-grid-fields', '', ...fields.filter(meant).map(row));
    if (!title) return grid;
    const special = fields.filter((it) => !asByDefault(it)).map((it) => `${it.title} ${shown(values[it.name])}`);
    const node = h3.make('details', 'more ly-group');
    const bad = fields.some((it) => wrong(it));
    const head = h3.make('summary', '', '', h3.make('span', 'ly-group-name', title),
      h3.make('span', 'ly-group-values' + (bad ? ' bad' : ''), special.join(', ') || 'all as by default'));
    node.dataset.group = title;
    node.open = opened.has(title) || fields.some((it) => typed[it.name]);
    node.addEventListener('toggle', () => (node.open ? opened.add(title) : opened.delete(title)));
    node.append(head, grid);
    return node;
  }

  function draw(nextFound, nextBase, nextValues) {
    if (nextValues !== values) typed = {};
    [found, base, values] = [nextFound, nextBase, nextValues];
    const active = document.activeElement && document.activeElement.dataset.plan;
    const groups = new Map();
    for (const it of found.fields) if (it.families.includes(values.family)) groups.set(it.group, [...(groups.get(it.group) || []), it]);
    box.replaceChildren(...[...groups].map(([title, fields]) => group(title, fields)));
    if (active) { const again = box.querySelector(`[data-plan='${active}']`); if (again) again.focus(); }
  }

  // The sentence of the first number that cannot be kept, "" for none.
  function refused() {
    const [first] = Object.values(typed);
    return first ? first.reason : '';
  }

  return { draw, refused, shown };
}

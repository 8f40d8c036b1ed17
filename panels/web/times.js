// Two-column tables of the result card: stage times by their standard names, fields as text.
function pair(name, text, cls) {
  const tr = h3.make('tr', cls), th = h3.make('th', '', name);
  th.scope = 'row';
  if (name === 'load') th.append(h3.make('small', 'meaning', 'once per engine start'));
  tr.append(th, h3.make('td', '', text));
  return tr;
}

function timeRows(timings) {
  const rows = timings.columns.map(([name, value]) => (
    value === null ? pair(name, 'not measured', 'none') : pair(name, h3.seconds(value))));
  if (timings.peak_memory_bytes) rows.push(pair('peak memory', h3.bytes(timings.peak_memory_bytes)));
  return rows;
}

function plainText(value) {
  if (value === null || value === undefined || value === '') return '–';
  if (Array.isArray(value)) return value.length ? value.map((v) => (v && typeof v === 'object' ? v.name || v.media || v.kind : v)).join(', ') : '–';
  return typeof value === 'object' ? JSON.stringify(value) : String(value);
}

function fieldRows(request, plan) {
  const skip = ['prompt', 'references'];
  const rows = Object.entries(request || {}).filter(([name]) => !skip.includes(name)).map(([name, value]) => pair(name, plainText(value)));
  for (const [name, value] of Object.entries(plan || {})) {
    if (name !== 'models') rows.push(pair(`plan ${name}`, plainText(value)));
    else for (const [role, path] of Object.entries(value)) rows.push(pair(role, plainText(path)));
  }
  return rows;
}

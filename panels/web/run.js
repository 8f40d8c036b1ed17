// The run: phase, bar, player, notes, stage table. Nodes stay, texts change.
const q = (s) => element.querySelector(s);
function make(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text) node.textContent = text;
  return node;
}
function fill(node, children) {
  node.replaceChildren(...children);
  node.parentElement.hidden = children.length === 0;
}
let started = 0;
function clock() {
  q('.run-clock').textContent = started ? ((Date.now() - started) / 1000).toFixed(0) + ' s' : '';
}
function draw() {
  const v = props.value || {};
  element.querySelector('.run').dataset.state = v.state || 'idle';
  q('.run-title').textContent = v.title || '';
  q('.run-phase').textContent = v.phase || '';
  q('.run-error').textContent = v.error || '';
  q('.run-error').hidden = !v.error;
  q('.run-waiting').textContent = v.waiting || '';
  started = v.running ? Date.now() - v.age_seconds * 1000 : 0;
  clock();
  const bar = q('.bar');
  bar.hidden = !v.running;
  bar.dataset.open = v.total ? 'no' : 'yes';
  bar.setAttribute('aria-valuemax', v.total || 1);
  bar.setAttribute('aria-valuenow', v.done || 0);
  q('.bar-fill').style.width = v.total ? (100 * v.done / v.total) + '%' : '';
  const video = q('video'), url = v.video ? new URL(v.video, location.href).href : '';
  if (url && video.src !== url) video.src = url;
  if (!url && video.getAttribute('src')) { video.removeAttribute('src'); video.load(); }
  video.hidden = !url;
  q('.stage-empty').hidden = !!url;
  q('.screen').style.aspectRatio = v.aspect || '16 / 9';
  q('.stage-empty').textContent = v.empty || '';
  const save = q('.save');
  save.hidden = !url;
  if (url) { save.href = url; save.download = v.id + '.mp4'; }
  q('.run-facts').textContent = v.facts || '';
  fill(q('.notes'), (v.notes || []).map((n) => make('li', n.warning ? 'warn' : '', n.text)));
  fill(q('.times tbody'), (v.rows || []).map((r) => {
    const tr = make('tr', r[1] === 'not measured' ? 'none' : '');
    const th = make('th', '', r[0]);
    th.scope = 'row';
    tr.append(th, make('td', '', r[1]));
    return tr;
  }));
  q('.times-box').hidden = !(v.rows || []).length;
}
const ticking = setInterval(() => (element.isConnected ? clock() : clearInterval(ticking)), 1000);
watch('value', draw);
draw();

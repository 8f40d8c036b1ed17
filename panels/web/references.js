// The ordered references: drop, paste, choose; thumbnails; order by drag or buttons; mute, soundtrack.
const q = (s) => element.querySelector(s);
const list = q('.refs'), pick = q('.pick'), pickSound = q('.pick-sound'), ICON = { image: 'picture', video: 'video', audio: 'note' };
let plans = [], soundFor = -1, dragged = -1;

const items = () => h3.draft.get().references;
const put = (references) => h3.draft.set({ references });
const change = (index, fields) => put(items().map((item, i) => (i === index ? { ...item, ...fields } : item)));

function move(from, to) {
  const next = [...items()];
  next.splice(to, 0, ...next.splice(from, 1));
  put(next);
}

function add(media) {
  const same = items().filter((item) => item.kind === media.kind).length;
  if (same >= h3.draft.MOST[media.kind]) {
    throw new Error(`at most ${h3.draft.MOST[media.kind]} references of this kind; remove one first`);
  }
  put([...items(), { kind: media.kind, media: media.id, name: media.name, facts: media.facts, mute: false, soundtrack: null }]);
}

function setSound(media) {
  const sound = media.kind === 'audio' || (media.facts && media.facts.audio_rate);
  if (!sound) throw new Error('it holds no sound; choose an audio file');
  change(soundFor, { soundtrack: { media: media.id, name: media.name }, mute: false });
}

function facts(item) {
  const f = item.facts || {}, words = [];
  if (f.width) words.push(`${f.width}×${f.height}`);
  if (item.kind === 'video' && f.fps) words.push(`${+f.fps.toFixed(2)} fps`);
  if (item.kind !== 'image' && f.seconds) words.push(`${f.seconds.toFixed(1)} s`);
  if (f.audio_rate) words.push(`${{ 1: 'mono', 2: 'stereo' }[f.audio_channels ?? f.channels] || `${f.audio_channels ?? f.channels} ch`} ${+(f.audio_rate / 1000).toFixed(1)} kHz`);
  else if (item.kind === 'video') words.push('no sound');
  if (f.hdr) words.push(f.hdr);
  if (f.rotation) words.push(`turned ${f.rotation}°`);
  return words.join(' · ');
}

function plan(index) {
  const p = plans[index];
  if (!p) return '';
  if (p.problem) return h3.sized(p.problem);
  const words = [];
  const said = p.notes.some((note) => note.includes(`-> ${p.width}x${p.height}`)); // the note tells the size before, too
  if (p.width && !said) words.push(`encoded at ${p.width}×${p.height}`);
  if (p.kind === 'video' && p.frames) words.push(`${p.frames} frames kept`);
  words.push(`${(p.rows + p.text_rows).toLocaleString('en')} rows`);
  return [words.join(' · '), ...p.notes.map(h3.sized)].join(' · ');
}

function thumb(item) {
  const box = h3.make('div', 'thumb', '', h3.icon(ICON[item.kind]));
  if (item.kind === 'audio' || item.missing || item.unsure) return box;
  const image = h3.make('img');
  image.alt = '';
  image.draggable = false;
  image.src = `/api/v1/media/${encodeURIComponent(item.media)}/thumb`;
  image.addEventListener('load', () => box.replaceChildren(image));
  return box;
}

function tools(item, index, total) {
  const box = h3.make('div', 'ref-tools');
  if (item.kind === 'video' && !item.missing) {
    if (item.soundtrack) box.append(h3.button('ico wide', 'own sound', 'Use the sound of the video itself', () => change(index, { soundtrack: null })));
    else box.append(h3.button('ico', item.mute ? 'mute' : 'sound', item.mute ? 'Use its sound' : 'Leave its sound out', () => change(index, { mute: !item.mute })));
    box.append(h3.button('ico wide', 'sound…', 'Replace its sound by a sound file', () => { soundFor = index; pickSound.click(); }));
  }
  const up = h3.button('ico', 'up', `Move ${item.name} up`, () => move(index, index - 1));
  const down = h3.button('ico', 'down', `Move ${item.name} down`, () => move(index, index + 1));
  up.disabled = index === 0;
  down.disabled = index === total - 1;
  up.dataset.act = 'up';
  down.dataset.act = 'down';
  const away = h3.button('ico', 'close', `Remove ${item.name}`, () => put(items().filter((_, i) => i !== index)));
  away.dataset.act = 'remove';
  box.append(up, down, away);
  return box;
}

function row(item, index, total, tag) {
  const li = h3.make('li', 'ref' + (item.missing ? ' missing' : ''));
  li.draggable = true;
  const head = h3.make('div', 'ref-head', '', h3.make('span', 'ref-tag', tag.own), h3.make('span', 'ref-name', item.name));
  const words = h3.make('div', 'ref-words', '', head);
  words.append(h3.make('div', 'ref-facts', item.missing ? 'no longer on this console: add the file again' : facts(item)));
  const sound = item.soundtrack ? `with the sound of ${item.soundtrack.name}` : tag.sound ? 'with its own sound' : '';
  if (sound && !item.missing) words.append(h3.make('div', 'ref-facts ref-sound', `${sound}: ${tag.sound}`));
  const told = plan(index);
  if (told) words.append(h3.make('div', 'ref-plan' + (plans[index].problem ? ' bad' : ''), told));
  li.append(thumb(item), words, tools(item, index, total));
  li.addEventListener('dragstart', (event) => { dragged = index; event.dataTransfer.effectAllowed = 'move'; event.dataTransfer.setData('text/plain', tag.own); });
  li.addEventListener('dragend', () => { dragged = -1; draw(); });
  li.addEventListener('dragover', (event) => { if (dragged >= 0) { event.preventDefault(); li.dataset.over = dragged < index ? 'below' : 'above'; } });
  li.addEventListener('dragleave', () => delete li.dataset.over);
  li.addEventListener('drop', (event) => { if (dragged >= 0) { event.preventDefault(); event.stopPropagation(); const from = dragged; dragged = -1; move(from, index); } });
  return li;
}

function draw() {
  const all = items(), tags = h3.draft.tags();
  list.replaceChildren(...all.map((item, i) => row(item, i, all.length, tags[i])));
  q('.refs-empty').hidden = all.length > 0;
  h3.write(q('.refs-count'), all.length ? String(all.length) : '');
}

// Files may be dropped anywhere on the form; that of LTX has a first frame instead of references.
const take = (files) => (h3.family.isLtx(h3.draft.get()) ? h3.emit('first-frame', files) : upload(files, add));
const form = element.closest('.form');
const holdsFiles = (event) => [...event.dataTransfer.types].includes('Files');
form.addEventListener('dragover', (event) => { if (holdsFiles(event)) { event.preventDefault(); form.dataset.drop = 'yes'; } });
form.addEventListener('dragleave', (event) => { if (!form.contains(event.relatedTarget)) delete form.dataset.drop; });
form.addEventListener('drop', (event) => {
  delete form.dataset.drop;
  if (!holdsFiles(event)) return;
  event.preventDefault();
  take([...event.dataTransfer.files]);
});
form.addEventListener('paste', (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); take(files); }
});
q('.add').addEventListener('click', () => pick.click());
pick.addEventListener('change', () => { const files = [...pick.files]; pick.value = ''; upload(files, add); });
pickSound.addEventListener('change', () => { const files = [...pickSound.files]; pickSound.value = ''; upload(files, setSound, true); });
h3.on('add-files', ({ files, plain }) => upload(files, add, plain), element);
h3.on('draft', ({ changed }) => { if (changed.includes('references')) { plans = []; draw(); } }, element);
h3.on('estimate', (estimate) => {
  plans = estimate && estimate.references.length === items().length ? estimate.references : [];
  if (dragged < 0) draw();
}, element);
draw();

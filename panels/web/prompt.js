// Preset, prompt, a button for every reference tag, and what a dropped mp4 of ours brought back.
const q = (s) => element.querySelector(s);
const area = q('textarea'), bar = q('.tagbar'), preset = q('.preset'), note = q('.dropped');
let tags = '', dropped = null;

function insert(tag) {
  const at = area.selectionStart, before = area.value.slice(0, at), after = area.value.slice(area.selectionEnd);
  const left = before && !/\s$/.test(before) ? ' ' : '', right = after && !/^\s/.test(after) ? ' ' : '';
  area.setRangeText(left + tag + right, at, area.selectionEnd, 'end');
  area.dispatchEvent(new Event('input', { bubbles: true }));
  area.focus();
}

function draw() {
  const now = h3.draft.tags().flatMap(({ own, sound }) => (sound ? [own, sound] : [own]));
  if (now.join() === tags) return;
  tags = now.join();
  const buttons = now.map((tag) => h3.button('tag', tag, `Insert ${tag} into the prompt`, () => insert(tag)));
  bar.replaceChildren(...(buttons.length ? [h3.make('span', 'tagbar-word', 'Insert'), ...buttons] : []));
}

function choose() {
  const chosen = props.value.presets.find((one) => one.name === preset.value);
  preset.value = '';
  if (!chosen) return;
  const { prompt, references, ...numbers } = chosen.request;
  const texts = Object.fromEntries(Object.entries(numbers).map(([k, v]) => [k, typeof v === 'number' ? String(v) : v]));
  h3.draft.set({ ...texts, ...(prompt ? { prompt } : {}) });
}

// The banner of the demo model follows the chosen plan.
function demo() {
  const plan = (h3.plans.get() || []).find((one) => one.name === h3.draft.get().plan);
  q('.demo-banner').hidden = !(plan && plan.demo);
}

h3.fill(preset, props.value.presets.map((one) => one.name), '', 'Start from a preset');
preset.addEventListener('change', choose);
q('.clear').addEventListener('click', () => { h3.draft.set({ prompt: '', references: [], editing: '' }); area.focus(); });
q('.as-reference').addEventListener('click', () => { h3.emit('add-files', { files: [dropped], plain: true }); note.hidden = true; });
h3.on('restored', ({ file, missing }) => {
  dropped = file;
  note.hidden = false;
  const gone = missing.length ? ` Not on this console any more: ${missing.join(', ')}; add them again.` : '';
  h3.write(q('.dropped-text'), `The settings of ${file.name} are in the form.${gone}`);
}, element);
h3.draft.bind(element);
h3.on('draft', () => { draw(); demo(); }, element);
h3.on('plans', demo, element);
draw();
demo();

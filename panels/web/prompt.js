// Preset, prompt, a button for every reference tag, and what a dropped mp4 of ours brought back.
const q = (s) => element.querySelector(s);
const area = q('textarea'), bar = q('.tagbar'), preset = q('.preset'), families = q('.families'), note = q('.dropped');
const SAID = 40; // characters of a prompt that name a job
let tags = '', dropped = null;

function insert(tag) {
  const at = area.selectionStart, before = area.value.slice(0, at), after = area.value.slice(area.selectionEnd);
  const left = before && !/\s$/.test(before) ? ' ' : '', right = after && !/^\s/.test(after) ? ' ' : '';
  area.setRangeText(left + tag + right, at, area.selectionEnd, 'end');
  area.dispatchEvent(new Event('input', { bubbles: true }));
  area.focus();
}

// A tag that stands for nothing is an ordinary word to the model.
function unknown(there) {
  const found = h3.family.isLtx(h3.draft.get()) ? null : area.value.match(/<(Picture|Video|Audio) \d+>/g);
  const said = [...new Set(found || [])].filter((tag) => !there.includes(tag));
  const have = there.length ? `there ${there.length > 1 ? 'are' : 'is'} ${there.join(', ')}` : 'no reference is added';
  h3.write(q('.tag-note'), said.length ? `${said.join(', ')} in the prompt stand${said.length > 1 ? '' : 's'} for nothing: ${have}.` : '');
}

// Which job the form changes, as long as it waits.
function editing() {
  const job = h3.jobs.get(h3.draft.get().editing), box = q('.editing');
  box.hidden = !job;
  if (!job) return;
  const place = h3.jobs.queued().findIndex((one) => one.id === job.id) + 1, text = job.prompt || 'no prompt';
  const name = text.length > SAID ? `${text.slice(0, SAID)}…` : text;
  h3.write(box, `You are editing job ${place} of the queue, “${name}”: save the changes or discard them below.`);
}

function draw() {
  const now = (h3.family.isLtx(h3.draft.get()) ? [] : h3.draft.tags()).flatMap(({ own, sound }) => (sound ? [own, sound] : [own]));
  unknown(now);
  if (now.join() === tags) return;
  tags = now.join();
  const buttons = now.map((tag) => h3.button('tag', tag, `Insert ${tag} into the prompt`, () => insert(tag)));
  bar.replaceChildren(...(buttons.length ? [h3.make('span', 'tagbar-word', 'Insert'), ...buttons] : []));
}

function choose() {
  const chosen = props.value.presets.find((one) => one.name === preset.value);
  preset.value = '';
  if (!chosen) return;
  const { prompt, ...numbers } = h3.draft.typed(chosen.request);
  h3.draft.set({ ...numbers, ...(prompt ? { prompt } : {}) });
}

// The banner of the demo model follows the chosen plan.
function demo() {
  const plan = (h3.plans.get() || []).find((one) => one.name === h3.draft.get().plan);
  q('.demo-banner').hidden = !(plan && plan.demo);
}

// The choice of the family, and its presets; the other parts of the form are hidden by its name.
function family() {
  const { family: chosen } = h3.draft.get();
  element.closest('.form').dataset.family = chosen;
  for (const node of families.children) node.setAttribute('aria-pressed', node.dataset.family === chosen);
  h3.fill(preset, props.value.presets.filter((one) => one.request.family === chosen).map((one) => one.name), '', 'Start from a preset');
}

families.replaceChildren(...Object.entries(h3.families).map(([name, { title }]) => {
  const node = h3.button('', title, '', () => h3.draft.set({ family: name }));
  node.dataset.family = name;
  return node;
}));
preset.addEventListener('change', choose);
q('.clear').addEventListener('click', () => {
  h3.draft.set({ prompt: '', editing: '', ...(h3.family.isLtx(h3.draft.get()) ? { ltx_image: null } : { references: [] }) });
  area.focus();
});
q('.as-reference').addEventListener('click', () => { h3.draft.set({ family: 'h3' }); h3.emit('add-files', { files: [dropped], plain: true }); note.hidden = true; });
h3.on('restored', ({ file, missing }) => {
  dropped = file;
  note.hidden = false;
  const gone = missing.length ? ` Not on this console any more: ${missing.join(', ')}; add them again.` : '';
  h3.write(q('.dropped-text'), `The settings of ${file.name} are in the form.${gone}`);
}, element);
h3.draft.bind(element);
h3.on('draft', ({ changed }) => { if (changed.includes('family')) family(); draw(); demo(); editing(); }, element);
h3.on('jobs', editing, element);
h3.on('plans', demo, element);
family();
draw();
demo();
editing();

// LTX's part of the form: one picture as the first frame, sizes on its grid, and its licence.
const q = (s) => element.querySelector(s);
const { multiple, frames: [LEAST, MOST] } = h3.families.ltx;
const pick = q('.pick-frame'), box = q('.frame');
let told = null; // what the planner says of the picture

sizeFields(element, {
  names: { width: 'ltx_width', height: 'ltx_height', frames: 'ltx_frames' },
  sizes: props.value.sizes,
  side: (x) => clamp(Math.round(x / multiple) * multiple, multiple, 4096),
  frames: (x) => { const n = clamp(Math.round(x), LEAST, MOST); return Math.min(n + (((1 - n) % 8) + 8) % 8, MOST); },
  fps: () => { const rate = Number(h3.draft.get().ltx_fps); return rate > 0 && isFinite(rate) ? rate : 0; },
});

const put = (ltx_image) => h3.draft.set({ ltx_image });

function setFrame(media) {
  if (media.kind !== 'image') throw new Error(`it is a ${media.kind === 'audio' ? 'sound' : 'video'}; LTX takes one picture as its first frame`);
  put({ media: media.id, name: media.name, facts: media.facts });
}

function thumb(image) {
  const node = h3.make('div', 'thumb frame-thumb', '', h3.icon('picture'));
  if (image.missing || image.unsure) return node;
  const picture = h3.make('img');
  picture.alt = `First frame ${image.name}`;
  picture.src = `/api/v1/media/${encodeURIComponent(image.media)}/thumb`;
  picture.addEventListener('load', () => node.replaceChildren(picture));
  return node;
}

function frame() {
  const image = h3.draft.get().ltx_image;
  q('.refs-empty').hidden = !!image;
  q('.refs-count').hidden = !!image;
  h3.write(q('.add-frame'), image ? 'Replace' : 'Choose a picture');
  if (!image) { box.replaceChildren(); return; }
  const facts = image.missing ? 'no longer on this console: add the picture again' : image.facts ? `${image.facts.width}×${image.facts.height}` : '';
  const words = h3.make('div', 'ref-words', '', h3.make('span', 'ref-name', image.name), h3.make('div', 'ref-facts', facts));
  if (told) words.append(h3.make('div', 'ref-plan' + (told.problem ? ' bad' : ''), h3.sized(told.problem || told.notes.join(' · '))));
  const away = h3.button('ico', 'close', `Remove ${image.name}`, () => put(null));
  away.dataset.act = 'remove';
  box.replaceChildren(h3.make('div', 'ref' + (image.missing ? ' missing' : ''), '', thumb(image), words, h3.make('div', 'ref-tools', '', away)));
}

// What became of a first frame that an older draft had, under the place where it stood.
function lost() {
  for (const sentence of h3.draft.lost('frame')) line({ name: 'first frame' }).failed(sentence);
}

// One quiet line on the licence of the plan's weights; a note with a button while it is needed.
function licence() {
  const state = h3.licence.of(h3.draft.get().plan), line = q('.licence-line'), note = q('.licence-note');
  note.hidden = !state || state.state !== 'needed';
  line.hidden = !state || !['random weights', 'acknowledged'].includes(state.state);
  if (!state) return;
  const its = h3.licence.terms(state.licence), name = `${its.name} of ${h3.licence.dated(its.date)}`;
  h3.write(q('.licence-words'), `The ${name} is to be acknowledged before ${state.file} runs here.`);
  h3.write(line, state.state === 'acknowledged' ? `The ${name} is acknowledged for ${state.file}.` : 'Random weights of make-demo: no licence is to be acknowledged for them.');
}

q('.licence-open').addEventListener('click', () => h3.licence.ask(h3.licence.of(h3.draft.get().plan)));
q('.add-frame').addEventListener('click', () => pick.click());
pick.addEventListener('change', () => { const files = [...pick.files]; pick.value = ''; upload(files, setFrame); });
h3.on('first-frame', ([first, ...others]) => {
  upload([first], setFrame);
  for (const file of others) line(file).failed('LTX takes one picture as its first frame, and another was taken');
}, element);
h3.on('draft', ({ changed }) => {
  if (changed.includes('ltx_image')) told = null;
  if (['ltx_image', 'family'].some((name) => changed.includes(name))) frame();
  if (changed.includes('plan')) licence();
}, element);
h3.on('estimate', (estimate) => { told = (h3.family.isLtx(h3.draft.get()) && estimate && estimate.references[0]) || null; frame(); }, element);
const licences = () => h3.licence.refresh().catch(() => {}); // the refusal of a job says it, too
h3.on('licences', licence, element);
h3.on('session', licences, element);
h3.on('plans', licences, element);
h3.on('lost', lost, element);
frame();
lost();
licences();

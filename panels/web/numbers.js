// Size, frames, steps, seed and sampling; what will be snapped is said before it happens.
const q = (s) => element.querySelector(s);
const FPS = props.value.fps, MULTIPLE = 32, size = q('.size');
const became = {}; // what was typed before it was snapped, until the field is changed again
const field = (name) => q(`[data-field='${name}']`);

for (const name of ['sampler', 'scheduler', 'ref_image_size']) h3.fill(field(name), props.value[name], h3.draft.get()[name]);

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const side = (x) => clamp(Math.round(x / MULTIPLE) * MULTIPLE, 32, 4096);
const frames = (x) => { const n = clamp(Math.round(x), 5, 3592); return n + (((5 - n) % 17) + 17) % 17; };

// A typed number on the model's grid, or null where there is no number: the request then says why.
function snapped(name) {
  const value = Number(h3.draft.get()[name]);
  if (String(h3.draft.get()[name]).trim() === '' || !isFinite(value)) return null;
  return name === 'frames' ? frames(value) : side(value);
}

function draw() {
  const d = h3.draft.get(), now = `${d.width}×${d.height}`;
  const sizes = [...props.value.sizes];
  if (!sizes.includes(now)) sizes.push(now);
  h3.fill(size, sizes, now);
  const made = snapped('frames'), words = [];
  const from = became.frames ? `${became.frames} became ` : String(made) === d.frames ? '' : `${d.frames} becomes `;
  if (made !== null) words.push(`${from}${made} frames = ${(made / FPS).toFixed(2)} s at ${FPS} fps`);
  for (const name of ['width', 'height']) {
    const to = snapped(name);
    if (became[name]) words.push(`${name} ${became[name]} became ${to}`);
    if (to !== null && String(to) !== d[name]) words.push(`${name} ${d[name]} becomes ${to}`);
  }
  h3.write(q('.snap'), words.join(' · '));
}

for (const name of ['frames', 'width', 'height']) {
  field(name).addEventListener('change', () => {
    const to = snapped(name);
    if (to === null || String(to) === h3.draft.get()[name]) return;
    became[name] = h3.draft.get()[name];
    h3.draft.set({ [name]: String(to) }, 'snap');
  });
}
size.addEventListener('change', () => {
  const [width, height] = size.value.split('×');
  h3.draft.set({ width, height });
});
q('.turn').addEventListener('click', () => { const { width, height } = h3.draft.get(); h3.draft.set({ width: height, height: width }); });
q('.dice').addEventListener('click', () => h3.draft.set({ seed: String(crypto.getRandomValues(new Uint32Array(1))[0]) }));
h3.draft.bind(element);
h3.on('draft', ({ from, changed }) => {
  if (from !== 'snap') for (const name of changed) delete became[name];
  draw();
}, element);
draw();
q('.turn').append(h3.icon('swap'));
q('.dice').append(h3.icon('dice'));

// Sizes, frames and seed on a model's grid: what will be snapped is said before it happens.
// names: draft keys of width, height, frames; side, frames: put a number on the grid; fps: of now.
function sizeFields(element, { names, sizes, side, frames, fps }) {
  const q = (s) => element.querySelector(s), size = q('.size');
  const became = {}; // what was typed before it was snapped, until the field is changed again
  const field = (key) => q(`[data-field='${key}']`);
  const held = (name) => h3.draft.get()[names[name]];

  // A typed number on the grid, or null where there is no number: the request then says why.
  function snapped(name) {
    const value = Number(held(name));
    if (String(held(name)).trim() === '' || !isFinite(value)) return null;
    return name === 'frames' ? frames(value) : side(value);
  }

  function draw() {
    const now = `${held('width')}×${held('height')}`, all = [...sizes];
    if (!all.includes(now)) all.push(now);
    h3.fill(size, all, now);
    const made = snapped('frames'), words = [], rate = fps();
    const from = became.frames ? `${became.frames} became ` : String(made) === held('frames') ? '' : `${held('frames')} becomes `;
    if (made !== null) words.push(`${from}${made} frames` + (rate ? ` = ${(made / rate).toFixed(2)} s at ${rate} fps` : ''));
    for (const name of ['width', 'height']) {
      const to = snapped(name);
      if (became[name]) words.push(`${name} ${became[name]} became ${to}`);
      if (to !== null && String(to) !== held(name)) words.push(`${name} ${held(name)} becomes ${to}`);
    }
    h3.write(q('.snap'), words.join(' · '));
  }

  for (const name of ['frames', 'width', 'height']) {
    field(names[name]).addEventListener('change', () => {
      const to = snapped(name);
      if (to === null || String(to) === held(name)) return;
      became[name] = held(name);
      h3.draft.set({ [names[name]]: String(to) }, 'snap');
    });
  }
  size.addEventListener('change', () => {
    const [width, height] = size.value.split('×');
    h3.draft.set({ [names.width]: width, [names.height]: height });
  });
  q('.turn').addEventListener('click', () => h3.draft.set({ [names.width]: held('height'), [names.height]: held('width') }));
  q('.dice').addEventListener('click', () => h3.draft.set({ seed: String(crypto.getRandomValues(new Uint32Array(1))[0]) }));
  q('.turn').append(h3.icon('swap'));
  q('.dice').append(h3.icon('dice'));
  h3.draft.bind(element);
  h3.on('draft', ({ from, changed }) => {
    if (from !== 'snap') for (const name of Object.keys(names)) if (changed.includes(names[name])) delete became[name];
    draw();
  }, element);
  draw();
}

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

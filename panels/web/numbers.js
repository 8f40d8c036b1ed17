// H3's size, frames, steps, seed and sampling.
const MULTIPLE = 32, OFFSET = 5, GRID = 17;

for (const name of ['sampler', 'scheduler', 'ref_image_size']) h3.fill(element.querySelector(`[data-field='${name}']`), props.value[name], h3.draft.get()[name]);

sizeFields(element, {
  names: { width: 'width', height: 'height', frames: 'frames' },
  sizes: props.value.sizes,
  side: (x) => clamp(Math.round(x / MULTIPLE) * MULTIPLE, MULTIPLE, 4096),
  frames: (x) => { const n = clamp(Math.round(x), OFFSET, 3592); return n + (((OFFSET - n) % GRID) + GRID) % GRID; },
  fps: () => props.value.fps,
});

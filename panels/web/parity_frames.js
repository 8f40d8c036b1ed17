// Frames of both sides with their difference as a heat map: slider, gain, temporal joins.
function frameView(root) {
  const find = (css) => root.querySelector(css);
  const slider = find('.pa-seekframe'), gain = find('.pa-gain input'), strip = find('.pa-strip');
  const images = new Map(); // url -> promise of an image
  let frames = null, url = '', at = 0, drawing = 0;

  function load(side, n) {
    const path = url + side + '/' + n;
    if (!images.has(path)) {
      images.set(path, new Promise((done, failed) => {
        const image = new Image();
        image.onload = () => done(image);
        image.onerror = () => { images.delete(path); failed(new Error('frame ' + (n + 1) + ' could not be loaded')); };
        image.src = path;
      }));
    }
    return images.get(path);
  }

  function put(canvas, image) {
    canvas.width = frames.width;
    canvas.height = frames.height;
    const context = canvas.getContext('2d', { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    return context;
  }

  const largest = () => Math.max(...frames.frames.map((f) => f.scale)) || 0;
  const colours = () => frames.palette.map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));

  // The PNG holds palette colours of level/255 of the frame's own scale; they are read back to
  // levels and drawn anew for a scale that is the same for all frames.
  function heat(canvas, image) {
    const context = put(canvas, image);
    const data = context.getImageData(0, 0, canvas.width, canvas.height), pixels = data.data;
    const table = colours(), levels = new Map(table.map(([r, g, b], i) => [(r << 16) | (g << 8) | b, i]));
    const scale = largest(), times = scale ? (frames.frames[at].scale / scale) * 2 ** Number(gain.value) : 0;
    for (let i = 0; i < pixels.length; i += 4) {
      const level = levels.get((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]) || 0;
      const [r, g, b] = table[Math.min(255, Math.round(level * times))];
      pixels[i] = r; pixels[i + 1] = g; pixels[i + 2] = b;
    }
    context.putImageData(data, 0, 0);
  }

  async function draw() {
    const turn = ++drawing, n = at;
    words();
    let sides;
    try {
      sides = await Promise.all(['golden', 'ours', 'difference'].map((side) => load(side, n)));
    } catch (error) {
      if (turn === drawing) h3.write(find('.pa-scale'), error.message);
      return;
    }
    if (turn !== drawing) return;
    put(find('.pa-golden'), sides[0]);
    put(find('.pa-ours'), sides[1]);
    heat(find('.pa-heat'), sides[2]);
    if (n + 1 < frames.count) for (const side of ['golden', 'ours', 'difference']) load(side, n + 1).catch(() => {});
  }

  function words() {
    const f = frames.frames[at], times = 2 ** Number(gain.value), scale = largest();
    const figures = f.equal ? 'bit-equal' : 'max ' + figure(f.max_abs) + ' · mean ' + figure(f.mean_abs) + ' · ' + psnr(f.psnr);
    h3.write(find('.pa-frame'), 'frame ' + (at + 1) + ' of ' + frames.count + ' · ' + figures + (f.join === null ? '' : ' · in the join at ' + (f.join + 1)));
    find('.pa-frame').dataset.join = f.join === null ? '' : 'yes';
    h3.write(find('.pa-gain output'), '×' + (times < 10 ? times.toFixed(times % 1 ? 1 : 0) : Math.round(times)));
    h3.write(find('.pa-scale'), scale ? 'black 0 to yellow ' + figure(scale / times) + ' (largest difference of the case: ' + figure(scale) + ', of values 0 to 1)' : 'no difference in any frame');
    slider.setAttribute('aria-valuetext', 'frame ' + (at + 1) + (f.join === null ? '' : ', temporal join'));
    for (const bar of strip.children) bar.toggleAttribute('data-here', Number(bar.dataset.frame) === at);
  }

  // One bar a frame: its largest difference; joins are shaded.
  function bars() {
    const scale = largest();
    strip.replaceChildren(...frames.frames.map((f) => {
      const bar = h3.make('span', 'pa-bar-box', '', h3.make('i'));
      bar.firstChild.style.height = f.equal ? '0' : Math.max(4, (100 * f.scale) / (scale || 1)) + '%';
      bar.dataset.frame = f.frame;
      if (f.join !== null) { bar.dataset.join = f.join; bar.title = 'temporal join at ' + (f.join + 1); }
      bar.addEventListener('click', () => go(f.frame));
      return bar;
    }));
  }

  function go(n) {
    at = Math.max(0, Math.min(frames.count - 1, n));
    slider.value = at;
    draw();
  }

  slider.addEventListener('input', () => go(Number(slider.value)));
  gain.addEventListener('input', draw);
  find('.pa-back').addEventListener('click', () => go(at - 1));
  find('.pa-on').addEventListener('click', () => go(at + 1));
  find('.pa-join').addEventListener('click', () => go(frames.joins.find((j) => j > at) ?? frames.joins[0]));
  find('.pa-worst').addEventListener('click', () => go(worst()));
  const worst = () => frames.frames.reduce((most, f) => (f.scale > frames.frames[most].scale ? f.frame : most), 0);

  return {
    show(found, base) {
      images.clear();
      frames = found && found.frames ? found : null;
      root.hidden = !found;
      if (!found) return;
      const usable = !!frames;
      for (const child of root.children) if (!child.classList.contains('pa-head')) child.hidden = !usable;
      h3.write(find('.pa-source'), usable ? 'from ' + found.source + ' · ' + found.width + '×' + found.height : found.reason);
      if (!usable) return;
      url = base;
      slider.max = frames.count - 1;
      find('.pa-join').hidden = !frames.joins.length;
      find('.pa-ramp').style.background = 'linear-gradient(90deg,' + frames.palette.filter((_, i) => i % 32 === 0 || i === 255).join(',') + ')';
      for (const canvas of root.querySelectorAll('canvas')) canvas.style.aspectRatio = frames.width + ' / ' + frames.height;
      bars();
      go(worst());
    },
  };
}

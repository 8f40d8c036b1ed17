// Two players that show the same frame: play, step, loop, and the sound of one of them.
const DRIFT_SECONDS = 0.02, JUMP_SECONDS = 0.3;

function players(root) {
  const find = (s) => root.querySelector(s);
  const a = find('.ab-a video'), b = find('.ab-b video'), stage = find('.ab');
  let frames = 0, fps = 24, now = 0, looping = true, sound = 'a', rate = 1, playing = false;

  const master = () => (sound === 'b' ? b : a); // the one that is heard is never pulled along
  const follower = () => (sound === 'b' ? a : b);
  const frameAt = (seconds) => Math.min(frames - 1, Math.max(0, Math.floor(seconds * fps + 0.01)));
  const usable = () => frames > 0;

  function label() {
    find('.ab-seek').value = now;
    h3.write(find('.ab-frame'), usable() ? 'frame ' + (now + 1) + ' of ' + frames : '');
    h3.write(find('.ab-play'), playing ? 'Pause' : 'Play');
  }

  // The middle of a frame: its edges are not exact in either player.
  function seek(frame) {
    now = Math.min(frames - 1, Math.max(0, frame));
    a.currentTime = b.currentTime = (now + 0.5) / fps;
    label();
  }

  function pause() {
    if (!playing) return;
    playing = false;
    a.pause();
    b.pause();
    seek(frameAt(master().currentTime));
  }

  async function play() {
    if (!usable() || playing) return;
    if (now >= frames - 1) seek(0);
    playing = true;
    follower().currentTime = master().currentTime;
    label();
    try {
      await Promise.all([a.play(), b.play()]);
    } catch (error) { // paused or unloaded before it began
      if (playing) { playing = false; label(); }
    }
  }

  function step(count) {
    if (!usable()) return;
    pause();
    seek(now + count);
  }

  // A player that reached its end is paused by the browser, wherever it is sent afterwards.
  function resume() {
    for (const video of [a, b]) if (video.paused) video.play().catch(() => {}); // paused again
  }

  function ended() {
    if (!looping) { pause(); return; }
    seek(0);
    resume();
  }

  // A small drift is caught up by speed, which cannot be seen; a large one by a jump.
  function together() {
    const lead = master().currentTime - follower().currentTime;
    if (Math.abs(lead) > JUMP_SECONDS || follower().paused) follower().currentTime = master().currentTime;
    resume();
    const catching = Math.abs(lead) > DRIFT_SECONDS && Math.abs(lead) <= JUMP_SECONDS;
    follower().playbackRate = rate * (catching ? 1 + Math.max(-0.25, Math.min(0.25, lead / 0.3)) : 1);
  }

  function follow(video) {
    video.requestVideoFrameCallback((_, { mediaTime }) => {
      if (!root.isConnected) return;
      if (playing && video === master()) {
        now = frameAt(mediaTime);
        together();
        label();
        if (now >= frames - 1) ended();
      }
      follow(video);
    });
  }

  function setSound(which) {
    sound = which;
    a.muted = which !== 'a';
    b.muted = which !== 'b';
    a.playbackRate = b.playbackRate = rate;
    for (const node of root.querySelectorAll('.ab-sound button')) node.setAttribute('aria-pressed', node.dataset.sound === which);
  }

  function setMode(mode) {
    stage.dataset.mode = mode;
    for (const node of root.querySelectorAll('.ab-modes button')) node.setAttribute('aria-pressed', node.dataset.mode === mode);
    h3.state('compare.mode', mode);
  }

  function loop(on) {
    looping = on;
    find('.ab-loop').setAttribute('aria-pressed', on);
  }

  function wipe(share) {
    find('.ab-wipe').value = share;
    stage.style.setProperty('--wipe', Math.min(100, Math.max(0, share)) + '%');
  }

  // sides: {url, frames, fps, width, height} or null for a run without a video; A's frames are counted.
  function load(sideA, sideB) {
    pause();
    frames = sideA && sideB ? Math.min(sideA.frames, sideB.frames) : 0;
    if (sideA) fps = sideA.fps;
    for (const [video, side] of [[a, sideA], [b, sideB]]) {
      const url = side ? new URL(side.url, location.href).href : '';
      if (url && video.src !== url) video.src = url;
      if (!url && video.hasAttribute('src')) { video.removeAttribute('src'); video.load(); }
    }
    stage.style.setProperty('--aspect', sideA ? sideA.width / sideA.height : 16 / 9);
    find('.ab-seek').max = Math.max(0, frames - 1);
    for (const node of root.querySelectorAll('.ab-controls button, .ab-controls input, .ab-controls select, .ab-wipe')) node.disabled = !usable();
    now = 0;
    if (usable()) seek(0);
    else label();
  }

  function key(event) {
    const act = {
      ',': () => step(-1), '.': () => step(1), l: () => loop(!looping), a: () => setSound('a'), b: () => setSound('b'), m: () => setSound(''),
      ' ': () => (playing ? pause() : play()),
    }[event.key];
    if (!act || (event.key === ' ' && event.target.closest('button, summary, a'))) return;
    event.preventDefault();
    act();
  }

  function drag(event) {
    if (stage.dataset.mode !== 'wipe' || event.target.closest('input') || !(event.buttons & 1)) return;
    const box = stage.getBoundingClientRect();
    wipe(100 * (event.clientX - box.left) / box.width);
  }

  find('.ab-play').addEventListener('click', () => (playing ? pause() : play()));
  find('.ab-less').addEventListener('click', () => step(-1));
  find('.ab-next').addEventListener('click', () => step(1));
  find('.ab-seek').addEventListener('input', (event) => { pause(); seek(Number(event.target.value)); });
  find('.ab-loop').addEventListener('click', () => loop(!looping));
  find('.ab-rate').addEventListener('change', (event) => { rate = Number(event.target.value); a.playbackRate = b.playbackRate = rate; });
  find('.ab-wipe').addEventListener('input', (event) => wipe(Number(event.target.value)));
  find('.ab-sound').addEventListener('click', (event) => { const node = event.target.closest('button'); if (node) setSound(node.dataset.sound); });
  find('.ab-modes').addEventListener('click', (event) => { const node = event.target.closest('button'); if (node) setMode(node.dataset.mode); });
  for (const type of ['pointerdown', 'pointermove']) stage.addEventListener(type, drag);
  for (const video of [a, b]) video.addEventListener('ended', () => { if (playing && video === master()) ended(); });
  follow(a);
  follow(b);
  setMode(h3.state('compare.mode') || 'wipe');
  wipe(50);
  return { load, pause, key };
}

// h3.draft: the request being written, as typed; it survives reloads. h3.form() and h3.load().
(() => {
  const WHOLE = { width: 'width', height: 'height', frames: 'frames', steps: 'steps' };
  const REAL = { cfg: 'CFG', shift_video: 'video shift', shift_audio: 'audio shift' };
  const TAGS = { image: 'Picture', video: 'Video', audio: 'Audio' };
  const NUMBERS = [...Object.keys(WHOLE), ...Object.keys(REAL), 'seed'];
  const MOST = { image: 9, video: 3, audio: 3 };
  const LARGEST_SEED = 2n ** 64n - 1n;
  let draft = null, first = null, key = ''; // key: where the draft of the signed-in user is kept
  // sentences on what was taken out of the draft, which nobody has read yet, by the place that tells them
  const lost = { frame: [], plan: [] };

  const LTX = { width: 'ltx_width', height: 'ltx_height', frames: 'ltx_frames', fps: 'ltx_fps' }; // its own fields
  const keep = () => { if (key) h3.state(key, draft); };
  const save = h3.debounce(150, keep);
  addEventListener('pagehide', keep);

  // A request's fields as the form holds them; prompt and seed are those of both families.
  function typed(request) {
    const out = {};
    if (request.family === 'ltx') {
      for (const key of Object.keys(LTX)) if (key in request) out[LTX[key]] = String(request[key]);
      for (const key of ['prompt', 'seed']) if (key in request) out[key] = String(request[key]);
      return out;
    }
    for (const key of Object.keys(first.request)) {
      if (key === 'references' || key === 'family' || !(key in request)) continue;
      out[key] = NUMBERS.includes(key) ? String(request[key]) : request[key];
    }
    return out;
  }

  // The header calls this once with {request, ltx, family, plan, families}: what a page shows until
  // it knows whose it is. plans: the plan last used of each family.
  function start(given) {
    first = given;
    h3.families = given.families;
    const both = { ...typed(given.ltx), ...typed(given[given.family === 'ltx' ? 'ltx' : 'request']) };
    draft = {
      ...typed(given.request), ...both, family: given.family, references: [], ltx_image: null, plan: given.plan,
      plans: { [given.family]: given.plan }, plan_b: '', keep_latents: true, editing: '',
    };
  }

  // What this user wrote before; several people may use one browser.
  function resume(user) {
    key = `draft/${user}`;
    set(h3.kept(h3.state(key), draft));
    compared();
    look().catch(() => {}); // the console does not answer, which the header says
  }

  // Files of an older draft may have been deleted since: the first frame is taken out, references
  // are marked, as their places count in the prompt.
  async function look() {
    if (![draft.ltx_image, ...draft.references].some((item) => item && item.unsure)) return;
    const there = new Set((await h3.api('/media')).media.map((one) => one.id));
    const gone = (item) => !there.has(item.media) || !!(item.soundtrack && !there.has(item.soundtrack.media));
    const seen = (item) => (item && item.unsure ? { ...item, unsure: false, missing: gone(item) } : item);
    const image = seen(draft.ltx_image), away = !!image && image.missing && draft.ltx_image.unsure;
    if (away) {
      const named = draft.ltx_image.missing ? 'The first frame' : `The first frame, ${image.name},`;
      lost.frame.push(`${named} is no longer on this console and was taken out of the form; add the picture again.`);
    }
    set({ ltx_image: away ? null : image, references: draft.references.map(seen) });
    if (away) h3.emit('lost');
  }

  // A plan to compare with may have been deleted since: it is taken out, as soon as that is known.
  function compared() {
    const known = h3.plans.get(), { plan_b } = draft;
    if (!plan_b || !known || known.some((one) => one.name === plan_b)) return;
    lost.plan.push(`Plan ${plan_b}, which was to be compared with, is no longer on this console and was taken out of the form; choose another one under Compare with, or nothing.`);
    set({ plan_b: '' });
    h3.emit('lost');
  }

  // The sentences of a place, which are told once.
  const tellLost = (place) => lost[place].splice(0);
  h3.on('session', ({ user }) => { if (!key) resume(user); });

  // Lays changes over the draft; `from` is the part that made them and needs no redraw. The family
  // is that of the plan; a family alone brings the plan that was last used of it.
  function set(changes, from) {
    const before = draft.family;
    Object.assign(draft, changes);
    if ('family' in changes && !('plan' in changes) && draft.family !== before) draft.plan = h3.plans.of(draft.family, draft.plans[draft.family]);
    draft.family = h3.plans.family(draft.plan) || draft.family;
    draft.plans = { ...draft.plans, [draft.family]: draft.plan };
    if (draft.plan_b && (h3.plans.family(draft.plan_b) || draft.family) !== draft.family) draft.plan_b = '';
    save();
    h3.emit('draft', { from, changed: [...Object.keys(changes), ...(draft.family === before ? [] : ['family', 'plan'])] });
  }

  // Plans that came after the draft may be of another family than it was thought to be, and a family
  // that was chosen before they came has no plan yet.
  h3.on('plans', () => {
    if (!draft) return;
    compared();
    if (!draft.plan) set({ plan: h3.plans.of(draft.family, '') });
    else if ((h3.plans.family(draft.plan) || draft.family) !== draft.family) set({});
  });

  function number(text, what, whole) {
    const value = Number(String(text).trim());
    if (String(text).trim() === '' || !isFinite(value) || (whole && !Number.isInteger(value))) {
      throw new Error(`${what} must be a ${whole ? 'whole ' : ''}number, got '${text}'`);
    }
    return value;
  }

  function seed(text) {
    const digits = String(text).trim();
    if (!/^\d+$/.test(digits)) throw new Error(`seed must be a whole number from 0, got '${text}'`);
    if (BigInt(digits) > LARGEST_SEED) throw new Error(`seed must be at most ${LARGEST_SEED}, got '${text}'`);
    return digits; // as text: it may be more than a JavaScript number can hold
  }

  function ltxForm() {
    const request = { family: 'ltx', prompt: draft.prompt, seed: seed(draft.seed) }, image = draft.ltx_image;
    for (const key of Object.keys(LTX)) request[key] = number(draft[LTX[key]], key, true);
    if (image && image.missing) throw new Error(`${image.name} is no longer on this console; add the first frame again or remove it`);
    return image ? { ...request, image: image.media } : request;
  }

  // The request JSON of the draft; an Error with one sentence for what cannot be sent.
  function form() {
    if (draft.family === 'ltx') return ltxForm();
    const request = { family: 'h3' };
    for (const key of Object.keys(first.request)) if (key !== 'references' && key !== 'family') request[key] = draft[key];
    for (const [key, what] of Object.entries(WHOLE)) request[key] = number(draft[key], what, true);
    for (const [key, what] of Object.entries(REAL)) request[key] = number(draft[key], what, false);
    request.seed = seed(draft.seed);
    const missing = draft.references.find((item) => item.missing);
    if (missing) throw new Error(`${missing.name} is no longer on this console; add the file again or remove it`);
    request.references = draft.references.map(({ kind, media, soundtrack, mute }) => (
      { kind, media, soundtrack: soundtrack ? soundtrack.media : null, mute: !!mute }));
    return request;
  }

  const base = (path) => String(path || '').split('/').pop();

  function reference(given, library) {
    const media = library.get(given.media), sound = given.soundtrack && library.get(given.soundtrack);
    const item = { kind: given.kind, media: given.media, name: media ? media.name : given.name || base(given.path) || 'a file', mute: !!given.mute, soundtrack: null };
    if (media) item.facts = media.facts;
    if (given.soundtrack) item.soundtrack = { media: given.soundtrack, name: sound ? sound.name : base(given.soundtrack) };
    item.missing = !media || !!(given.soundtrack && !sound);
    return item;
  }

  // The first frame of a request of LTX; its id is "" when no library has it.
  function frame(image, library) {
    if (image === null || image === undefined) return null;
    const media = library.get(image);
    return { media: image, name: media ? media.name : 'its first frame', facts: media && media.facts, missing: !media };
  }

  // Fills the form from a request JSON (references by media id); opens Generate. Returns the names
  // of references that are no longer there.
  async function load(request, { plan, plan_b = '', editing = '', stay = false } = {}) {
    const library = new Map(), ltx = request.family === 'ltx';
    if ((request.references || []).length || request.image) for (const one of (await h3.api('/media')).media) library.set(one.id, one);
    if (ltx) {
      const image = frame(request.image, library);
      set({ ...typed(request), ltx_image: image, editing, plan_b, family: 'ltx', ...(plan ? { plan } : {}) });
      if (!stay) h3.go('generate');
      return image && image.missing ? [image.name] : [];
    }
    const references = (request.references || []).map((one) => reference(one, library));
    set({ ...typed(request), references, editing, plan_b, family: 'h3', ...(plan ? { plan } : {}) });
    if (!stay) h3.go('generate');
    return references.filter((one) => one.missing).map((one) => one.name);
  }

  // The runtime's notes, with sizes spelled as everywhere on the page.
  const sized = (text) => text.replace(/(\d)x(\d)/g, '$1×$2');

  const hasSound = (item) => item.kind === 'video' && !item.mute && !!(item.soundtrack || (item.facts && item.facts.audio_rate));

  // {own, sound} of every reference in order: its tag, such as "<Picture 1>", and that of the sound
  // of a video, "" without one. Each kind counts from 1 as the model counts, which is given the
  // videos before the sounds: the sound of a video stands before every sound file.
  function tags() {
    const seen = {}, told = draft.references.map(() => ({ own: '', sound: '' }));
    const next = (kind) => `<${TAGS[kind]} ${(seen[kind] = (seen[kind] || 0) + 1)}>`;
    for (const kind of Object.keys(TAGS)) draft.references.forEach((item, i) => {
      if (item.kind !== kind) return;
      if (hasSound(item)) told[i].sound = next('audio');
      told[i].own = next(kind);
    });
    return told;
  }

  // Keeps every [data-field] below an element and the draft the same.
  function bind(element) {
    const fields = [...element.querySelectorAll('[data-field]')];
    const show = (node) => {
      const value = draft[node.dataset.field];
      if (node.type === 'checkbox') node.checked = !!value;
      else if (node.value !== String(value)) node.value = value;
    };
    for (const node of fields) {
      show(node);
      node.addEventListener(node.tagName === 'SELECT' || node.type === 'checkbox' ? 'change' : 'input', () => (
        set({ [node.dataset.field]: node.type === 'checkbox' ? node.checked : node.value }, node)));
    }
    h3.on('draft', ({ from }) => { for (const node of fields) if (node !== from) show(node); }, element);
  }

  Object.assign(h3, { form, load, sized, draft: { start, get: () => draft, set, typed, tags, bind, lost: tellLost, MOST, TAGS } });
})();

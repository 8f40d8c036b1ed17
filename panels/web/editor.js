// The plan editor of Backends: fields, model files, what differs from the plan begun with, check, save.
function editorView(root) {
  const q = (s) => root.querySelector(s);
  const FILES = {
    h3: { dit: 'Denoiser', text_encoder: 'Text encoder', video_vae: 'Video VAE', audio_vae: 'Audio VAE', tokenizer: 'Tokenizer folder (built in if empty)' },
    ltx: { dit: 'Denoiser', text_encoder: 'Text encoder folder', video_vae: 'Video VAE folder', audio_vae: 'Audio VAE folder', vocoder: 'Vocoder folder', upsampler: 'Latent upsampler folder' },
  };
  const NAME = /^[a-z0-9][a-z0-9_-]{0,59}$/; // as app/plans.py has it: a path with .. in it never gets there
  const known = h3.state('layout') || {};
  const fields = planFields(q('.ly-fields'), () => { q('.ly-verdict').hidden = true; draw(); });
  let found = null, plans = [], base = null, values = null;

  const admin = () => !!(h3.session && h3.session.admin);
  const named = (name) => plans.find((plan) => plan.name === name && plan.fields);

  function say(text) {
    h3.write(q('.ly-plan-alert'), text);
    q('.ly-plan-alert').hidden = !text;
  }

  // The words that tell two plans' fields apart, in the order of the editor.
  function differences(a, b) {
    const out = [];
    if (a.family !== b.family) out.push(['Model', title(a.family), title(b.family)]);
    for (const field of found ? found.fields : []) if (a[field.name] !== b[field.name]) out.push([field.title, a[field.name], b[field.name]]);
    for (const [key, words] of Object.entries({ ...FILES[b.family], ...FILES[a.family] })) {
      if ((a.models[key] || '') !== (b.models[key] || '')) out.push([words.split(' folder')[0], file(a.models[key]), file(b.models[key])]);
    }
    return out;
  }

  const title = (family) => (h3.families[family] || { title: family }).title;
  const file = (path) => (path ? path.split('/').pop() : 'built in');

  function listed(list, changes, none) {
    list.replaceChildren(...changes.map(([title, from, to]) => h3.make('li', '', '',
      h3.make('span', 'ly-change-name', title), h3.make('span', 'ly-values', '',
        h3.make('span', 'ly-from', fields.shown(from)), h3.make('span', 'ly-to', '→ ' + fields.shown(to))))));
    if (!changes.length) list.append(h3.make('li', 'ly-none', none));
  }

  function paths() {
    q('.ly-paths').replaceChildren(...Object.entries(FILES[values.family] || FILES.h3).map(([key, words]) => {
      const input = h3.make('input');
      input.value = values.models[key] || '';
      input.spellcheck = false;
      input.disabled = !admin();
      input.addEventListener('change', () => { values.models[key] = input.value.trim() || null; draw(); });
      return h3.make('label', 'f', '', h3.make('span', '', words), input);
    }));
  }

  function draw() {
    if (!values || !found) return;
    fields.draw(found, base, values);
    paths();
    const changes = differences(base, values);
    listed(q('.ly-differs .ly-changes'), changes, 'nothing yet');
    const plan = plans.find((one) => one.name === base.name);
    h3.write(q('.ly-origin'), plan ? plan.origin : '');
    h3.write(q('.ly-family'), title(values.family));
    q('.ly-delete').hidden = !(plan && plan.origin === 'user' && admin());
    for (const s of ['.ly-save', '.ly-check']) q(s).disabled = !admin();
    q('.ly-save').title = admin() ? '' : 'Only an admin may save plans';
  }

  function choose(name) {
    const plan = named(name) || plans.find((one) => one.fields);
    if (!plan) return;
    base = plan.fields;
    values = structuredClone(plan.fields);
    h3.state('layout', { ...known, base: plan.name });
    h3.plans.choices(q('.ly-base'), plan.name);
    q('.ly-name').value = plan.origin === 'user' ? plan.name : plan.name.toLowerCase().replace(/[^a-z0-9_-]/g, '-').slice(0, 55) + '-mine';
    q('.ly-verdict').hidden = true;
    say('');
    draw();
  }

  // The plan as PUT /plans takes it.
  function body() {
    if (fields.refused()) throw new Error(fields.refused());
    const { name, ...rest } = values;
    return rest;
  }

  async function save() {
    const name = q('.ly-name').value.trim();
    if (!NAME.test(name)) throw new Error(`a plan's name has 1 to 60 of a-z, 0-9, _ and -, and begins with a letter or digit; got '${name.slice(0, 60)}'`);
    await h3.api('/plans/' + encodeURIComponent(name), { method: 'PUT', body: body() });
    await h3.plans.refresh();
    choose(name);
  }

  async function check() {
    const verdict = q('.ly-verdict'), plan = body();
    verdict.hidden = false;
    verdict.replaceChildren(h3.make('span', 'ly-words', 'Checking with the request of the Generate form …'));
    const e = await h3.api('/preflight', { method: 'POST', body: { request: h3.form(), plan } });
    const rows = [['VRAM', e.vram], ['RAM', e.ram], ['disk', e.disk]].map(([name, need]) => {
      const pill = h3.make('span', 'pill', need.verdict);
      pill.dataset.verdict = need.verdict;
      return h3.make('li', 'ly-need', '', h3.make('span', 'ly-where', name), pill, h3.make('span', 'ly-reason', need.reason));
    });
    const words = [e.blocked, ...e.warnings].filter(Boolean).map((text) => h3.make('li', 'ly-need bad', text));
    if (e.rows.total !== null) words.push(h3.make('li', 'ly-need', `${e.rows.total.toLocaleString('en')} packed rows`));
    verdict.replaceChildren(h3.make('ul', 'ly-needs', '', ...words, ...rows));
  }

  const guarded = (fn) => async () => {
    say('');
    try { await fn(); } catch (error) { q('.ly-verdict').hidden = true; say(error.message); }
  };
  q('.ly-base').addEventListener('change', () => choose(q('.ly-base').value));
  q('.ly-save').addEventListener('click', guarded(save));
  q('.ly-check').addEventListener('click', guarded(check));
  q('.ly-use').addEventListener('click', () => { h3.draft.set({ plan: base.name }); h3.go('generate'); });
  q('.ly-delete').addEventListener('click', guarded(async () => {
    await h3.api('/plans/' + encodeURIComponent(base.name), { method: 'DELETE' });
    await h3.plans.refresh();
    choose(plans[0].name);
  }));

  function backends(next) {
    const first = !found;
    found = next;
    if (first && plans.length) choose(known.base || h3.draft.get().plan);
    else if (!root.contains(document.activeElement)) draw();
  }

  function listPlans(next) {
    plans = next;
    if (!found) return;
    if (!base) choose(known.base || h3.draft.get().plan);
    else draw();
  }

  return { backends, plans: listPlans, differences, listed, named };
}

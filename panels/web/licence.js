// h3.licence: what must be acknowledged before a plan's weights run here, and the dialog that asks.
(() => {
  const NEEDED = 428; // app/errors.py: the status of a job that waits for it
  let known = null;

  async function refresh() {
    known = await h3.api('/licences');
    h3.emit('licences', known);
    return known;
  }

  const of = (plan) => (known ? known.plans.find((one) => one.plan === plan) : null) || null;
  const terms = (id) => known.licences.find((one) => one.id === id);
  const dated = (iso) => new Date(iso + 'T12:00:00').toLocaleDateString('en-GB', { day: 'numeric', month: 'long', year: 'numeric' });

  function saysFile(state) {
    const box = h3.make('dl', 'pairs lic-file'), pair = (name, text, cls) => box.append(h3.make('dt', '', name), h3.make('dd', cls || '', text));
    for (const { file, metadata } of state.files) {
      pair('Weights', file);
      pair('Their header', metadata ? `license: ${metadata}` : 'no license metadata; rely on the text that came with them', metadata ? '' : 'lic-warn');
    }
    pair('Where the text is', 'It came with the weights that you obtained; this program brings none.');
    return box;
  }

  // Opens the dialog for one plan; true once it is acknowledged.
  function ask(state) {
    const licence = terms(state.licence), dialog = h3.make('dialog', 'h3dialog'), admin = !!(h3.session && h3.session.admin);
    const title = h3.make('h2', 'lic-title', licence.name), box = h3.make('input'), error = h3.make('div', 'alert');
    title.id = 'licence-title';
    dialog.setAttribute('aria-labelledby', title.id);
    box.type = 'checkbox';
    box.className = 'lic-read';
    error.setAttribute('role', 'alert');
    error.hidden = true;
    const yes = h3.button('primary lic-yes', 'Acknowledge', '', accept), no = h3.button('quiet lic-no', 'Not now', '', () => dialog.close());
    yes.disabled = true;
    box.disabled = !admin;
    box.addEventListener('change', () => { yes.disabled = !box.checked; });
    const lines = licence.terms.map((text) => h3.make('li', /revenue/.test(text) ? 'lic-strong' : '', text));
    const check = h3.make('label', 'check', '', box, h3.make('span', '', 'I have read the licence and the policy that came with the weights, and I use them within both.'));
    dialog.append(
      h3.make('div', 'lic-head', '', title, h3.make('p', 'lic-date', `of ${dated(licence.date)} · asked once before plan ${state.plan} first runs here`)),
      h3.make('ul', 'lic-terms', '', ...lines), saysFile(state), check,
      ...(admin ? [] : [h3.make('p', 'note', 'Only an admin of this console may acknowledge it, for everybody who uses this machine.')]),
      error, h3.make('div', 'lic-acts', '', no, yes));
    document.querySelector('.gradio-container .contain').append(dialog); // Gradio keeps the page's rules to it

    async function accept() {
      yes.disabled = true;
      try {
        known = await h3.api('/licences', { method: 'POST', body: { licence: licence.id, plan: state.plan } });
        h3.emit('licences', known);
        dialog.close('yes');
      } catch (problem) {
        h3.write(error, problem.message);
        error.hidden = false;
        yes.disabled = false;
      }
    }

    dialog.showModal();
    (admin ? box : no).focus({ preventScroll: true });
    dialog.scrollTop = 0; // it is read from its beginning
    return new Promise((done) => dialog.addEventListener('close', () => { dialog.remove(); done(dialog.returnValue === 'yes'); }));
  }

  // Asks for what the plans still need; an Error with one sentence when it is declined.
  async function all(plans) {
    for (const plan of new Set(plans)) {
      const state = of(plan);
      if (!state || state.state !== 'needed' || await ask(state)) continue;
      throw new Error(`Nothing was queued: plan ${plan} runs once the ${terms(state.licence).name} is acknowledged for ${state.file}.`);
    }
  }

  // Does `work` once all that its plans need is acknowledged. A refusal says that what is known here
  // is old (a file was replaced): it is asked anew, once.
  async function guarded(plans, work) {
    await all(plans);
    try {
      return await work();
    } catch (error) {
      if (error.status !== NEEDED) throw error;
      await refresh();
      await all(plans);
      return work();
    }
  }

  h3.licence = { refresh, of, terms, dated, ask, guarded };
})();

// The button, with the verdict beside it: queue the draft once, or save it into a queued job.
const q = (s) => element.querySelector(s);
const goButton = q('#go'), leave = q('.leave'), alertBox = q('.alert'), force = q('.force');
const HOLD_MILLISECONDS = 700; // a double click is one wish
const VERDICTS = { fits: 'fits', tight: 'tight', no: 'does not fit', unknown: 'not known' };
let busy = false;

function say(text) {
  h3.write(alertBox, text);
  alertBox.hidden = !text;
}

function draw() {
  const { editing, plan_b } = h3.draft.get();
  leave.hidden = !editing;
  h3.write(goButton, editing ? 'Save changes to job' : plan_b ? 'Generate both' : 'Generate');
  goButton.disabled = busy;
}

async function send() {
  const { plan, plan_b, keep_latents, editing } = h3.draft.get();
  const request = h3.form();
  if (editing) {
    await h3.licence.guarded([plan], () => h3.api('/jobs/' + encodeURIComponent(editing), { method: 'PATCH', body: { request, plan } }));
    h3.draft.set({ editing: '' });
    h3.jobs.refresh();
    return editing;
  }
  const body = { request, plans: plan_b ? [plan, plan_b] : [plan], keep_latents };
  if (q('#force').checked) body.force = true;
  const { jobs } = await h3.licence.guarded(body.plans, () => h3.api('/jobs', { method: 'POST', body }));
  h3.jobs.put(jobs);
  return jobs[0].id;
}

async function generate() {
  if (busy) return;
  busy = true;
  draw();
  say('');
  const held = new Promise((done) => setTimeout(done, HOLD_MILLISECONDS));
  try {
    h3.emit('queued', await send());
  } catch (error) {
    say(error.message);
  }
  await held;
  busy = false;
  draw();
}

goButton.addEventListener('click', generate);
leave.addEventListener('click', () => h3.draft.set({ editing: '' }));
function shortcut(event) {
  if (!element.isConnected) document.removeEventListener('keydown', shortcut);
  else if (event.key === 'Enter' && (event.ctrlKey || event.metaKey) && h3.at().tab === 'generate') { event.preventDefault(); generate(); }
}
document.addEventListener('keydown', shortcut);
// A job that has started can no longer be changed: what was edited stays, for a new job.
function started() {
  const { editing } = h3.draft.get(), job = editing && h3.jobs.get(editing);
  if (!editing || !h3.jobs.loaded || (job && job.state === 'queued')) return;
  h3.draft.set({ editing: '' });
  if (!busy) say('The job that you were editing waits no longer; your changes are in the form, for a new one.');
}

h3.on('draft', draw, element);
h3.on('jobs', started, element);
h3.on('estimate', (estimate) => {
  const verdict = q('.verdict');
  verdict.hidden = !estimate;
  if (estimate) { verdict.dataset.verdict = estimate.verdict; h3.write(verdict, VERDICTS[estimate.verdict]); }
  force.hidden = !(estimate && estimate.needs_force && !estimate.blocked);
  if (force.hidden) q('#force').checked = false;
}, element);
draw();
performance.mark('h3-ready'); // from here on the form can be used

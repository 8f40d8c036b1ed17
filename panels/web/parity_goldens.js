// The list of goldens: what each is, by what it was captured, and which are chosen; imports.
const KINDS = {
  e2e: 'whole runs', te: 'text encoder', vae_decode: 'video VAE decode', vae_encode: 'video VAE encode',
  audio: 'audio VAE', schedules: 'schedules', quant: 'quantisation', layout: 'layout',
  ltx_forward: 'LTX forwards', ltx_sampler: 'LTX stages', ltx_schedule: 'LTX schedules', ltx_rope: 'LTX rope',
  ltx_connectors: 'LTX connectors', ltx_dequant: 'LTX NVFP4 weights', ltx_linear: 'LTX W4A4 linears',
};

function goldenList(root, onChange, onError) {
  const find = (css) => root.querySelector(css);
  const body = find('.pa-goldens tbody'), all = find('.pa-all');
  const chosen = new Set(h3.state('parity.chosen') || []);
  let goldens = [];

  const shown = () => {
    const words = find('.pa-seek').value.trim().toLowerCase();
    const kind = find('.pa-kind').value, from = find('.pa-from').value;
    return goldens.filter((g) => (!kind || g.kind === kind) && (!from || g.collection === from)
      && (!words || (g.id + ' ' + g.mode + ' ' + g.prompt).toLowerCase().includes(words)));
  };

  function shape(g) {
    const parts = [];
    if (g.width) parts.push(g.width + '×' + g.height);
    if (g.frames) parts.push(g.frames + ' frames');
    if (g.steps) parts.push(g.steps + ' steps');
    return [parts.join(' · '), [g.sampler, g.scheduler, g.cfg !== 1 ? 'cfg ' + g.cfg : ''].filter(Boolean).join(' · ')];
  }

  function two(first, second, cls) {
    const cell = h3.make('td', 'wrap ' + (cls || ''), '', h3.make('span', 'pa-line', first));
    if (second) cell.append(h3.make('span', 'pa-line soft', second));
    return cell;
  }

  function row(g) {
    const box = h3.make('input');
    box.type = 'checkbox';
    box.checked = chosen.has(g.id);
    box.disabled = !!g.problem;
    box.setAttribute('aria-label', 'Choose ' + g.case);
    box.addEventListener('change', () => { box.checked ? chosen.add(g.id) : chosen.delete(g.id); changed(); });
    const kind = [KINDS[g.kind] || g.kind, g.mode, g.origin === 'imported' ? g.collection : ''].filter(Boolean).join(' · ');
    const name = two(g.origin === 'imported' ? g.id.split('/').pop() : g.case, kind, 'pa-wide');
    if (g.problem) name.append(h3.make('span', 'pa-line pa-problem', g.problem));
    const tr = h3.make('tr', '', '', h3.make('td', '', '', box), name, two(...shape(g)));
    const switches = Object.entries(g.switches).map(([key, value]) => key + ' ' + value);
    tr.append(two(switches.slice(0, 1).join(''), switches.slice(1).join(', ')));
    const comfy = two(g.comfyui || '–', g.commit ? g.commit.slice(0, 8) : '');
    if (g.commit) comfy.title = 'ComfyUI commit ' + g.commit;
    tr.append(comfy, two(g.torch || '–', g.comfy_kitchen ? 'kitchen ' + g.comfy_kitchen : ''));
    tr.append(h3.make('td', '', String(g.tensors || '–')));
    tr.addEventListener('click', (event) => { if (!event.target.closest('input')) box.click(); });
    tr.title = g.attention ? 'attention: ' + g.attention : '';
    return tr;
  }

  function draw() {
    const list = shown();
    body.replaceChildren(...list.map(row));
    find('.pa-none').hidden = list.length > 0;
    changed();
  }

  function changed() {
    const known = new Set(goldens.filter((g) => !g.problem).map((g) => g.id));
    for (const id of [...chosen]) if (!known.has(id)) chosen.delete(id);
    const usable = shown().filter((g) => !g.problem), on = usable.filter((g) => chosen.has(g.id)).length;
    all.checked = on > 0 && on === usable.length;
    all.indeterminate = on > 0 && on < usable.length;
    h3.write(find('.pa-count'), chosen.size + ' of ' + goldens.length + ' chosen');
    h3.state('parity.chosen', [...chosen]);
    onChange([...chosen], goldens);
  }

  function choices(select, none, pairs) {
    const kept = select.value;
    select.replaceChildren(new Option(none, ''), ...pairs.map(([value, text]) => new Option(text, value)));
    select.value = pairs.some(([value]) => value === kept) ? kept : '';
  }

  function collections(list) {
    find('.pa-collections').replaceChildren(...list.map((c) => {
      const remove = h3.button('quiet danger', 'Delete', 'Delete the collection ' + c.name);
      const said = c.owner + ', ' + h3.when(c.imported);
      remove.addEventListener('click', () => {
        if (remove.dataset.sure) act(() => h3.api('/parity/goldens/' + encodeURIComponent(c.name), { method: 'DELETE' }), remove);
        remove.dataset.sure = 'yes';
        remove.textContent = 'Really delete';
      });
      return h3.make('li', '', '', h3.make('b', '', c.name), h3.make('span', 'soft', said), remove);
    }));
  }

  async function refresh() {
    const found = await h3.api('/parity/goldens');
    goldens = found.goldens;
    choices(find('.pa-kind'), 'Any kind', [...new Set(goldens.map((g) => g.kind))].filter(Boolean).map((k) => [k, KINDS[k] || k]));
    choices(find('.pa-from'), 'Any collection', [...new Set(goldens.map((g) => g.collection))].map((c) => [c, c]));
    find('.pa-folder').hidden = !found.folders;
    collections(found.collections);
    draw();
  }

  async function act(work, button) {
    button.disabled = true;
    onError('');
    try {
      const made = await work();
      await refresh();
      return made;
    } catch (error) {
      onError(error.message);
    } finally {
      button.disabled = false;
    }
  }

  function imported(made) {
    if (!made) return;
    find('.pa-from').value = made.collection;
    draw();
  }

  for (const css of ['.pa-seek', '.pa-kind', '.pa-from']) find(css).addEventListener('input', draw);
  all.addEventListener('change', () => {
    for (const g of shown()) if (!g.problem) all.checked ? chosen.add(g.id) : chosen.delete(g.id);
    draw();
  });
  find('.pa-upload').addEventListener('submit', async (event) => {
    event.preventDefault();
    const file = find('.pa-file');
    if (!file.files.length) { onError('choose a .safetensors or .zip file first'); return; }
    const body = new FormData();
    body.append('file', file.files[0]);
    imported(await act(() => h3.api('/parity/goldens', { method: 'POST', body }), event.submitter));
    file.value = '';
  });
  find('.pa-folder').addEventListener('submit', async (event) => {
    event.preventDefault();
    const folder = find('.pa-path').value.trim();
    if (!folder) { onError('give the path of a folder of goldens'); return; }
    imported(await act(() => h3.api('/parity/goldens/folder', { method: 'POST', body: { folder } }), event.submitter));
  });

  return {
    refresh,
    choose(ids) { chosen.clear(); ids.forEach((id) => chosen.add(id)); draw(); },
  };
}

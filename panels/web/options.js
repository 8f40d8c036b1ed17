// h3.plans: the plans of this console, asked once and again when one was saved.
(() => {
  let list = null;

  // Emits `plans` with [{name, fields, origin}].
  async function refresh() {
    list = (await h3.api('/plans')).plans;
    h3.emit('plans', list);
    return list;
  }

  // Puts names into a <select>; `none` is the text of its empty choice, if it has one.
  function fill(select, names, value, none) {
    const options = names.map((name) => new Option(name, name));
    if (none) options.unshift(new Option(none, ''));
    if (value && !names.includes(value)) options.push(new Option(value, value));
    select.replaceChildren(...options);
    select.value = value;
  }

  Object.assign(h3, { plans: { refresh, get: () => list }, fill });
})();

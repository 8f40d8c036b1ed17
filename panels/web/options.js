// h3.plans: the plans of this console, asked once and again when one was saved.
(() => {
  let list = null;

  // Emits `plans` with [{name, fields, origin}].
  async function refresh() {
    list = (await h3.api('/plans')).plans;
    h3.emit('plans', list);
    return list;
  }

  // The family of a plan by its name, "" when it is not known.
  function family(name) {
    const plan = (list || []).find((one) => one.name === name);
    return (plan && plan.fields && plan.fields.family) || '';
  }

  // A plan of a family: the one that is wished for, else one that can run here.
  function of(wanted, wished) {
    const mine = (list || []).filter((one) => one.fields && one.fields.family === wanted);
    const found = mine.find((one) => one.name === wished) || mine.find((one) => one.runs) || mine[0];
    return found ? found.name : wished || '';
  }

  // Puts plans into a <select>, a group for each family where there are several; `only`: of one.
  function choices(select, value, { none = '', only = '' } = {}) {
    const groups = new Map();
    for (const one of list || []) {
      const its = family(one.name);
      if (only && its && its !== only) continue;
      groups.set(its, [...(groups.get(its) || []), new Option(one.name, one.name)]);
    }
    if (value && ![...groups.values()].flat().some((option) => option.value === value)) groups.set('', [...(groups.get('') || []), new Option(value, value)]);
    const nodes = [...groups].flatMap(([its, options]) => {
      if (groups.size < 2 || !its) return options;
      const group = document.createElement('optgroup');
      group.label = h3.families[its] ? h3.families[its].title : its;
      group.append(...options);
      return [group];
    });
    select.replaceChildren(...(none ? [new Option(none, '')] : []), ...nodes);
    select.value = value;
  }

  // Puts names into a <select>; `none` is the text of its empty choice, if it has one.
  function fill(select, names, value, none) {
    const options = names.map((name) => new Option(name, name));
    if (none) options.unshift(new Option(none, ''));
    if (value && !names.includes(value)) options.push(new Option(value, value));
    select.replaceChildren(...options);
    select.value = value;
  }

  Object.assign(h3, { plans: { refresh, get: () => list, family, of, choices }, fill });
})();

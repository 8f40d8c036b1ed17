// h3.kept: what is understood of a draft that this browser remembered: it may be of an older version
// of the page, or edited by hand. The rest is left as a page without a memory has it.
(() => {
  const NUMBERS = ['width', 'height', 'fps', 'seconds', 'frames', 'bytes', 'audio_rate', 'audio_channels'];
  const table = (value) => !!value && typeof value === 'object' && !Array.isArray(value);
  const names = (known, value) => typeof value === 'string' && Object.hasOwn(known, value); // ["ltx"] reads as "ltx"
  const texts = (value) => Object.fromEntries(Object.entries(value).filter(([, one]) => typeof one === 'string'));

  function facts(found) {
    if (!table(found)) return {};
    return { facts: Object.fromEntries(Object.entries(found).filter(([name, value]) => !NUMBERS.includes(name) || typeof value === 'number')) };
  }

  // A file of the library as the form holds it, null for what is none; unsure: it may be gone by now.
  function file(found) {
    if (!table(found) || typeof found.media !== 'string' || typeof found.name !== 'string') return null;
    return { media: found.media, name: found.name, missing: found.missing === true, unsure: true, ...facts(found.facts) };
  }

  function reference(found) {
    const media = file(found);
    if (!media || !names(h3.draft.MOST, found.kind)) return null;
    return { ...media, kind: found.kind, mute: found.mute === true, soundtrack: file(found.soundtrack) };
  }

  const SPECIAL = {
    references: (value) => (Array.isArray(value) ? value.map(reference).filter(Boolean) : undefined),
    ltx_image: file,
    plans: (value) => (table(value) ? texts(value) : undefined),
    family: (value) => (names(h3.families, value) ? value : undefined),
  };

  // The fields of `found` that a draft has, each of the kind that it has in `usual`.
  h3.kept = (found, usual) => {
    if (!table(found)) return {};
    const understood = Object.entries(usual).filter(([name]) => Object.hasOwn(found, name)).map(([name, value]) => (
      [name, SPECIAL[name] ? SPECIAL[name](found[name]) : typeof found[name] === typeof value ? found[name] : undefined]));
    return Object.fromEntries(understood.filter(([, value]) => value !== undefined));
  };
})();

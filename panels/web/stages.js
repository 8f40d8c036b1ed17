// Stage tables, shared by Timing, Runs and Compare. Seconds are exact here, not rounded for reading.
const NOT_MEASURED = 'not measured';

function exact(x) {
  if (x === null || x === undefined) return NOT_MEASURED;
  return x >= 0.1 ? x.toFixed(3) + ' s' : (x * 1000).toFixed(2) + ' ms';
}

function memory(x) {
  return x ? h3.bytes(x) : NOT_MEASURED;
}

function signed(x, words) {
  if (x === 0) return '±0';
  return (x > 0 ? '+' : '−') + words(Math.abs(x));
}

// At most three digits that tell something.
const digits = (x) => String(Number(x.toPrecision(3)));

function percent(now, base) {
  if (now === null || base === null || !base) return '';
  return signed(100 * (now / base - 1), (x) => (x < 10 ? x.toFixed(1) : digits(x)) + ' %');
}

// What the standard names leave open, said below them.
const MEANING = {
  load: 'once per engine start', denoise: 'its steps, without what is between them', 'per step': 'median of the steps',
};

function named(tag, name) {
  const node = h3.make(tag, '', name);
  if (name in MEANING) node.append(h3.make('small', 'meaning', MEANING[name]));
  return node;
}

// A row of cells; the first is its heading. Cells are [text, class].
function tableRow(name, cells) {
  const tr = h3.make('tr');
  const th = named('th', name);
  th.scope = 'row';
  tr.append(th, ...cells.map(([text, cls]) => h3.make('td', cls || '', text)));
  return tr;
}

function tableHead(names) {
  const tr = h3.make('tr');
  tr.append(...names.map((name) => {
    const th = h3.make('th', '', name);
    th.scope = 'col';
    return th;
  }));
  return tr;
}

// An encode that took so little of the other's time was not computed: the engine had it.
const ENCODES = ['text encode', 'reference encode'];
const fromCache = (name, x, other) => ENCODES.includes(name) && x !== null && other !== null && x < 0.02 * other;

// Value, base, difference and per cent; what takes more than 2 % longer is told apart by colour too.
function deltaCells(now, base, words, name) {
  if (fromCache(name, now, base)) return [[words(now) + ', from the cache', 'soft cached'], [words(base), ''], ['', ''], ['', '']];
  if (fromCache(name, base, now)) return [[words(now), ''], [words(base) + ', from the cache', 'soft cached'], ['', ''], ['', '']];
  const both = now !== null && base !== null;
  const gone = (x) => (x === null ? 'soft' : '');
  const tone = !both || !base || Math.abs(now / base - 1) < 0.02 ? '' : now > base ? 'worse' : 'better';
  return [
    [words(now), gone(now)],
    [words(base), gone(base)],
    [both ? signed(now - base, words) : '', tone],
    [both ? percent(now, base) : '', tone],
  ];
}

const plural = (count, one) => count + ' ' + one + (count === 1 ? '' : 's');

// The run in words: "960x544 · 124 frames · 12 steps · res_multistep beta · seed 440202".
function shapeWords(shape) {
  if (!shape || !shape.width) return [];
  const words = [shape.width + 'x' + shape.height, h3.family.frames(shape), h3.family.steps(shape), h3.family.sampling(shape), 'seed ' + shape.seed].filter(Boolean);
  if (h3.family.isLtx(shape)) words.unshift(h3.families.ltx.title);
  if (shape.cfg !== 1) words.push('cfg ' + shape.cfg);
  const kinds = shape.references || [];
  for (const [kind, one] of [['image', 'picture'], ['video', 'video'], ['audio', 'sound']]) {
    const count = kinds.filter((k) => k === kind).length;
    if (count) words.push(plural(count, one));
  }
  return words;
}

function chips(words) {
  return words.map((text) => h3.make('li', '', text));
}

// Answers from the explanations of a page, as the server gives them: see explain/records.py.
import { page } from './page.js';

const SHIFTED = { output: (rows) => rows, input: (rows) => [...rows.slice(1), ...rows.slice(-1)] };

/** The mean of matrices of one size. */
function mean(matrices) {
  return matrices[0].map((row, y) => row.map((_, x) => matrices.reduce((sum, one) => sum + one[y][x], 0) / matrices.length));
}

/** One matrix from the attention of all layers and heads: of a layer and a head, or their mean. */
function combine(attention, layer = 'mean', head = 'mean') {
  const layers = layer === 'mean' ? attention : [attention[Number(layer)]];
  return mean(layers.map((heads) => (head === 'mean' ? mean(heads) : heads[Number(head)])));
}

function map(one, { kind = 'cross', layer, head, method = 'attention', read_at: step = 'output' }) {
  const { source_tokens: columns, target_tokens: rows } = one.explanation;
  const found = { method, rows, columns, reading: page.readings[step] };
  if (method !== 'attention') {
    const { weights, signed } = one.attributions[method];
    return { ...found, weights, signed, largest: Math.max(...weights.flat().map(Math.abs)) };
  }
  const shift = kind === 'cross' ? SHIFTED[step] : SHIFTED.output;
  const weights = shift(combine(one.attention[kind], layer, head));
  return { ...found, rows: kind === 'cross' ? rows : columns, weights, signed: false, largest: Math.max(...weights.flat()) };
}

/** Rows of shares of the absolute values. */
function shares(weights) {
  const sums = weights.map((row) => row.reduce((sum, value) => sum + Math.abs(value), 0) || 1);
  return weights.map((row, y) => row.map((value) => Math.abs(value) / sums[y]));
}

function overlays(one, { layer, head }) {
  const method = one.attention.cross ? 'attention' : Object.keys(one.attributions)[0];
  const tokens = one.explanation.target_tokens.filter((token) => method === 'attention' || token !== '</s>');
  const weights = method === 'attention' ? combine(one.attention.cross, layer, head) : shares(one.attributions[method].weights).slice(0, tokens.length);
  const pictures = one.pictures.map((picture) => {
    const cells = picture.grid[0] * picture.grid[1];
    const maps = weights.map((row) => row.slice(picture.begin, picture.begin + cells));
    return { ...picture, maps, mass: maps.map((cell) => cell.reduce((sum, value) => sum + value, 0)) };
  });
  const [layers, heads] = one.explanation.kinds.cross ?? [1, 1];
  return { output: one.explanation.output, tokens, method, layers, heads, pictures };
}

const ANSWERS = {
  explanation: (one) => one.explanation,
  map: (one, params) => (one.attributions[params.method] || one.attention[params.kind ?? 'cross'] ? map(one, params) : null),
  heads: (one, { kind = 'cross' }) => ({ kind, pictures: one.attention[kind] }),
  attribution: (one, { method }) => one.attributions[method] ?? { method, verdict: one.verdict, measures: {}, uniform_swap: null },
  overlays: (one, params) => (one.attention.cross || Object.keys(one.attributions).length ? overlays(one, params) : null),
};

/** The kind of source, by what can be drawn of it. */
function modality() {
  const across = page.explanations.flatMap((one) => one.pictures.map((picture) => picture.across));
  if (!across.length) return 'text';
  return across.includes('seconds') ? 'audio' : 'image';
}

/** The answer to a request; null: the page does not contain it. */
export function recordedAnswer(path, params) {
  if (path === 'runs') return { runs: [{ ...page.run, modality: modality() }], gold: false };
  const one = page.explanations.find((each) => each.explanation.source === params.source);
  return one && ANSWERS[path] ? ANSWERS[path](one, params) : null;
}

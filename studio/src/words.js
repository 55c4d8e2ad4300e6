// Maps between words, from maps between tokens.

/** A row of words: [label, numbers of its tokens]. The tokens outside words, such as </s>, come last. */
function groups(tokens, words, labels) {
  const found = labels.map((label, word) => [label, words.flatMap((one, at) => (one === word ? [at] : []))]);
  const outside = words.flatMap((one, at) => (one < 0 ? [at] : []));
  if (!outside.length) return found;
  return [...found, [new Set(outside.map((at) => tokens[at])).size === 1 ? tokens[outside[0]] : 'other', outside]];
}

/** The map summed over the tokens of a source word, and averaged over those of a target word. */
export function toWords(weights, explanation) {
  const rows = groups(explanation.target_tokens, explanation.target_words, explanation.target_labels);
  const columns = groups(explanation.source_tokens, explanation.source_words, explanation.source_labels);
  const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
  return {
    rows: rows.map(([label]) => label),
    columns: columns.map(([label]) => label),
    weights: rows.map(([, tokens]) => columns.map(([, places]) => sum(tokens.map((y) => sum(places.map((x) => weights[y][x])))) / Math.max(1, tokens.length))),
  };
}

/** Whether words differ from tokens: several tokens make a word. */
export function hasWords(explanation) {
  return ['source', 'target'].some((side) => explanation[`${side}_words`].some((word, at, all) => word >= 0 && all.indexOf(word) !== at));
}

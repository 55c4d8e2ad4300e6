// Text of tokens as it is shown.

// Direction and other invisible format characters, but not the joiners, which belong to the spelling of many scripts.
const INVISIBLE = /[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/gu;

/** A token with visible blanks and without characters that would change the direction of its neighbours. */
export function shown(token) {
  const text = token.replace(INVISIBLE, '');
  if (text.trim() === '' && text !== '') return '␣'.repeat([...text].length);
  return text === '' ? '∅' : text.trim().replace(/[\p{Cc}]/gu, '\ufffd');
}

/** Whether a text is read from right to left: its first letter is Hebrew, Arabic, or of a related script. */
export function rightToLeft(text) {
  return /^[^\p{L}]*[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u.test(text);
}

/** The direction of a row of tokens. Special tokens such as <s> have none. */
export function direction(tokens) {
  return rightToLeft(tokens.filter((token) => !/^<.*>$/.test(token)).join(' ')) ? 'rtl' : 'ltr';
}

/** A number with few digits. */
export function short(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toExponential(1);
  return value.toFixed(digits);
}

/** Seconds as people say them. */
export function duration(seconds) {
  const all = Math.round(seconds);
  const [hours, minutes] = [Math.floor(all / 3600), Math.floor((all % 3600) / 60)];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${all % 60} s` : `${all} s`;
}

export function percent(value) {
  return value === null || value === undefined ? '–' : `${(100 * value).toFixed(1)} %`;
}

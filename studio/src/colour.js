// Colour scales that colour-blind readers can use: cividis (Nunez, Anderton & Renslow 2018) for magnitudes, blue to orange for signed
// values, a dark veil over pictures.

/** The veil over the parts of a picture that are not attended to, and its scale for a legend. */
export const VEIL = [10, 12, 18];
export const VEILED = 'linear-gradient(90deg, rgb(10 12 18), rgb(10 12 18 / 0) 100%), repeating-linear-gradient(45deg, #d9c9a3 0 4px, #b7c9d6 4px 8px)';
// In the light theme, small values meet the paper: white first, then cividis from its light end to its dark end.
const LIGHT = ['#ffffff', '#f4ecc0', '#ddcf86', '#b5ab7c', '#8a8678', '#656870', '#41506b', '#1e3a6e', '#00224e'];
const DARK = ['#14161a', '#10264c', '#23396b', '#47526d', '#6a6c72', '#8f8a78', '#b6a971', '#dcc857', '#fee838'];
const SIGNED_LIGHT = ['#8f4700', '#d08233', '#f1c492', '#ffffff', '#a9c4e6', '#4a7fc1', '#0b3b7a'];
const SIGNED_DARK = ['#ffab5c', '#c06f22', '#6b3d12', '#14161a', '#1b3a66', '#3a70bd', '#8dbcff'];

function parse(hex) {
  const number = parseInt(hex.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

const STEPS = 256;

function table(points) {
  const colours = points.map(parse);
  const found = new Uint8Array(STEPS * 3);
  for (let step = 0; step < STEPS; step += 1) {
    const at = (step / (STEPS - 1)) * (colours.length - 1);
    const below = Math.min(Math.floor(at), colours.length - 2);
    for (let channel = 0; channel < 3; channel += 1) {
      const [from, to] = [colours[below][channel], colours[below + 1][channel]];
      found[step * 3 + channel] = Math.round(from + (to - from) * (at - below));
    }
  }
  return found;
}

const TABLES = {
  light: { plain: table(LIGHT), signed: table(SIGNED_LIGHT) },
  dark: { plain: table(DARK), signed: table(SIGNED_DARK) },
};

/** The index of a value in a scale from 0 (or -largest) to largest. */
function index(value, largest, signed) {
  const share = largest > 0 ? value / largest : 0;
  const at = signed ? (share + 1) / 2 : share;
  return Math.max(0, Math.min(STEPS - 1, Math.round(at * (STEPS - 1))));
}

/** [red, green, blue] of a value. */
export function rgb(value, largest, { theme = 'light', signed = false } = {}) {
  const colours = TABLES[theme][signed ? 'signed' : 'plain'];
  const at = index(value, largest, signed) * 3;
  return [colours[at], colours[at + 1], colours[at + 2]];
}

/** The colour as CSS. */
export function css(value, largest, options) {
  return `rgb(${rgb(value, largest, options).join(' ')})`;
}

/** Black or white, whichever can be read on this colour. */
export function inkOn(value, largest, options) {
  const [red, green, blue] = rgb(value, largest, options).map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? '#000' : '#fff';
}

/** A CSS gradient of the scale, for a legend. */
export function gradient({ theme = 'light', signed = false } = {}) {
  const stops = Array.from({ length: 17 }, (_, step) => {
    const share = step / 16;
    return css(signed ? share * 2 - 1 : share, 1, { theme, signed });
  });
  return `linear-gradient(90deg, ${stops.join(', ')})`;
}

// A map as a picture: SVG text, or PNG from it. Also the download of a file.
import { css } from './colour.js';
import { short } from './text.js';

const CELL = 24;
const SCALE = { width: 120, height: 10, steps: 24, below: 34 }; // of the legend, in pixels

/** Saves content under a name. */
export function saveFile(name, content, type) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function element(name, attributes, text = null) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

/** The legend of a map: its colours from the smallest to the largest value, in steps, and their unit. */
function drawScale(x, y, { largest, signed, unit }) {
  const group = element('g', { fill: '#333' });
  const least = signed ? short(-largest) : '0';
  const begin = x + 6 + 7.5 * least.length;
  group.append(element('text', { x, y: y + 9 }, least));
  for (let step = 0; step < SCALE.steps; step += 1) {
    const share = step / (SCALE.steps - 1);
    const fill = css((signed ? 2 * share - 1 : share) * largest, largest, { signed });
    group.append(element('rect', { x: begin + (step * SCALE.width) / SCALE.steps, y, width: SCALE.width / SCALE.steps + 0.5, height: SCALE.height, fill }));
  }
  group.append(element('text', { x: begin + SCALE.width + 6, y: y + 9 }, `${short(largest)} ${unit}`));
  return { group, width: begin + SCALE.width + 12 + 7.5 * (short(largest).length + 1 + unit.length) };
}

/** The map as an SVG element. Its colours are those of the light theme: it is made for paper. */
function drawMap({ rows, columns, weights, largest, signed, label, unit }) {
  const left = 12 + 7.5 * Math.max(...rows.map((one) => [...one].length), 1);
  const top = 12 + 7.5 * Math.max(...columns.map((one) => [...one].length), 1);
  const bottom = top + rows.length * CELL;
  const scale = drawScale(12, bottom + 14, { largest, signed, unit });
  const [width, height] = [Math.max(left + columns.length * CELL + 12, scale.width), bottom + SCALE.below];
  const svg = element('svg', { viewBox: `0 0 ${width} ${height}`, width, height, 'font-size': 12, 'font-family': 'monospace' });
  svg.append(element('title', {}, label), element('rect', { width, height, fill: '#fff' }), scale.group);
  columns.forEach((text, x) => {
    const at = left + (x + 0.5) * CELL;
    svg.append(element('text', { transform: `translate(${at + 4} ${top - 6}) rotate(-90)`, fill: '#333' }, text));
  });
  rows.forEach((text, y) => {
    svg.append(element('text', { x: left - 6, y: top + (y + 0.5) * CELL + 4, 'text-anchor': 'end', fill: '#333' }, text));
    weights[y].forEach((value, x) => {
      const fill = css(value, largest, { signed });
      svg.append(element('rect', { x: left + x * CELL + 1, y: top + y * CELL + 1, width: CELL - 2, height: CELL - 2, rx: 3, fill, 'data-value': value }));
    });
  });
  return { svg, width, height };
}

/** Saves a map as SVG or PNG. */
export async function savePicture(map, format) {
  const { svg, width, height } = drawMap(map);
  const text = new XMLSerializer().serializeToString(svg);
  if (format === 'svg') {
    saveFile('map.svg', text, 'image/svg+xml');
    return;
  }
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [width * 2, height * 2];
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => saveFile('map.png', blob, 'image/png'), 'image/png');
}

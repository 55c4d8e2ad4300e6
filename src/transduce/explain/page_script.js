"use strict";
// Draws the JSON data of the page. Text is inserted as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const heat = $("heat"), mark = $("mark"), root = document.documentElement;
  let item, view, cell = null, frame = null;

  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const blank = (text) => (text.trim() === "" ? "␣".repeat(Math.max(1, text.length)) : text);
  const minus = (text) => text.replace("-", "−");
  const logarithm = (score) => (score === null ? "−∞" : minus(score.toFixed(3)));
  const percent = (share) =>
    (share > 0 && share < 0.00005 ? "under 0.01" : (100 * share).toFixed(share > 0.0995 ? 1 : 2)) + " %";
  const probability = (score) => (score === null ? 0 : Math.exp(score));
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const mean = (maps) => maps[0].map((row, t) => row.map((_, s) => sum(maps.map((map) => map[t][s])) / maps.length));

  const rightToLeft = (text) => /^[^\p{L}]*[\u0590-\u08FF\uFB1D-\uFDFF\uFE70-\uFEFC]/u.test(text);

  // The token map of the chosen layer and head, or of their mean.
  const chosen = () => {
    const layers = $("layer").value === "mean" ? item.attention : [item.attention[+$("layer").value]];
    return mean(layers.map((heads) => ($("head").value === "mean" ? mean(heads) : heads[+$("head").value])));
  };

  // The entries of an axis: [label, indices of its tokens, whether it is a word].
  const entries = (side) => {
    const tokens = item[side + "_tokens"], words = item[side + "_words"], labels = item[side + "_labels"];
    const all = tokens.map((_, i) => i);
    const ends = all.filter((i) => words[i] < 0);
    if ($("controls").elements.level.value === "tokens")
      return all.filter((i) => words[i] >= 0 || $("ends").checked).map((i) => [tokens[i], [i], words[i] >= 0]);
    const list = labels.map((label, word) => [label, all.filter((i) => words[i] === word), true]);
    const same = new Set(ends.map((i) => tokens[i])).size === 1;
    if (ends.length && $("ends").checked) list.push([same ? tokens[ends[0]] : "other", ends, false]);
    return list;
  };

  // Weights are summed over the tokens of a source word and averaged over those of a target word.
  const compute = () => {
    const map = chosen(), rows = entries("row"), columns = entries("source");
    if (rightToLeft(item.source)) columns.reverse(); // in the order in which the source is read
    const weights = rows.map(([, targets]) =>
      columns.map(([, sources]) => sum(targets.map((t) => sum(sources.map((s) => map[t][s])))) / Math.max(1, targets.length)));
    return { rows, columns, weights };
  };

  const colours = () => {
    const style = getComputedStyle(root);
    const named = Object.fromEntries(["none", "all", "ink", "soft", "link", "ground"].map((n) => [n, style.getPropertyValue("--" + n).trim()]));
    const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const from = parts(named.none), to = parts(named.all);
    named.shade = (w) => {
      const share = Math.min(1, Math.max(0, w)) ** 0.7;
      return "rgb(" + from.map((a, i) => Math.round(a + (to[i] - a) * share)).join(",") + ")";
    };
    return named;
  };

  const truncate = (pen, text, room) => {
    text = blank(text);
    if (pen.measureText(text).width <= room) return text;
    let characters = [...text];
    while (characters.length > 1 && pen.measureText(characters.join("") + "…").width > room) characters.pop();
    return characters.join("") + "…";
  };

  const layout = () => {
    const pen = heat.getContext("2d");
    const room = $("attention").clientWidth, narrow = room < 560;
    const size = narrow ? 12 : 14;
    const font = size + 'px system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif';
    pen.font = font;
    const most = narrow ? 160 : 480; // only labels that would fill the page are cut
    const rows = view.rows.map(([label]) => truncate(pen, label, most)), columns = view.columns.map(([label]) => truncate(pen, label, most));
    const widest = (labels) => Math.max(8, ...labels.map((label) => pen.measureText(label).width));
    const left = widest(rows) + 12, above = widest(columns);
    const share = (space) => Math.min(44, (space - left - 4) / Math.max(1, columns.length));
    const turned = above > share(room) - 4;
    const step = Math.max(20, share(turned ? room - above * 0.72 : room));
    const side = columns.length * rows.length > 40000 ? 6 : step; // very large maps have small cells
    const top = turned ? above * 0.72 + size + 10 : size + 14;
    const right = turned ? above * 0.72 + 4 : 4;
    return { pen, font, size, rows, columns, left, top, side, turned,
      width: left + side * columns.length + right, height: top + side * rows.length + 4 };
  };

  const fit = (canvas, { width, height }) => {
    const scale = Math.min(devicePixelRatio || 1, 16000 / width, 16000 / height); // the largest canvas that browsers allow
    canvas.width = Math.ceil(width * scale);
    canvas.height = Math.ceil(height * scale);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    return pen;
  };

  const write = (pen, f, axis, i, colour) => {
    pen.font = f.font;
    pen.fillStyle = colour;
    pen.textBaseline = "middle";
    if (axis === "row") {
      pen.textAlign = "right";
      pen.fillText(f.rows[i], f.left - 10, f.top + (i + 0.5) * f.side);
      return;
    }
    pen.save();
    pen.translate(f.left + (i + 0.5) * f.side, f.top - 8);
    pen.textAlign = f.turned ? "left" : "center";
    if (f.turned) pen.rotate(-Math.PI / 4);
    pen.fillText(f.columns[i], 0, f.turned ? 0 : -f.size / 2 + 2);
    pen.restore();
  };

  const paint = () => {
    if (!item.attention) return;
    frame = layout();
    const pen = fit(heat, frame), { left, top, side } = frame, ink = colours();
    const gap = side > 9 ? 1 : 0;
    view.weights.forEach((row, t) => {
      const largest = $("scaled").checked ? Math.max(...row, 1e-12) : 1;
      row.forEach((weight, s) => {
        pen.fillStyle = ink.shade(weight / largest);
        pen.fillRect(left + s * side, top + t * side, side - gap, side - gap);
      });
      const best = row.indexOf(Math.max(...row));
      if (best >= 0 && row[best] > 0 && view.rows[t][2] && view.columns[best][2] && side > 9) {
        pen.strokeStyle = ink.link;
        pen.lineWidth = 1.5;
        pen.strokeRect(left + best * side + 1.5, top + t * side + 1.5, side - gap - 3, side - gap - 3);
      }
    });
    if (side > 9) {
      view.rows.forEach((_, i) => write(pen, frame, "row", i, ink.soft));
      view.columns.forEach((_, i) => write(pen, frame, "column", i, ink.soft));
    }
    fit(mark, frame);
    point(cell);
  };

  // The selected cell is drawn on a second canvas, so that the map is not redrawn.
  const point = (place) => {
    cell = place;
    const pen = mark.getContext("2d"), ink = colours();
    pen.clearRect(0, 0, frame.width, frame.height);
    document.querySelectorAll("#tokens li").forEach((token) => token.style.removeProperty("box-shadow"));
    if (!place) {
      $("readout").textContent = "Point at a cell, or use the arrow keys, to read it.";
      return;
    }
    const { s, t } = place, { left, top, side } = frame, port = mark.closest(".scroll");
    if (left + (s + 1) * side > port.scrollLeft + port.clientWidth) port.scrollLeft = left + (s + 1) * side - port.clientWidth;
    if (s * side < port.scrollLeft) port.scrollLeft = s * side;
    pen.strokeStyle = ink.ink;
    pen.lineWidth = 2;
    pen.strokeRect(left + s * side, top + t * side, side - 1, side - 1);
    if (side > 9) {
      write(pen, frame, "row", t, ink.ink);
      write(pen, frame, "column", s, ink.ink);
    }
    const [row, tokens] = view.rows[t];
    const share = percent(view.weights[t][s]), column = blank(view.columns[s][0]);
    const outputs = item.encoder_only ? tokens.filter((i) => i < item.attributed) : tokens;
    if (item.encoder_only && outputs.length) {
      $("readout").textContent = `${share} of the attribution of “${blank(row)}” is on “${column}”.`;
    } else {
      const score = tokens.some((i) => item.token_scores[i] === null) ? null : sum(tokens.map((i) => item.token_scores[i]));
      $("readout").textContent = `“${blank(row)}” gave ${share} of its attention to “${column}”.` +
        (item.encoder_only ? "" : ` Its own probability is ${percent(probability(score))}.`);
    }
    outputs.forEach((i) => $("tokens").children[i]?.style.setProperty("box-shadow", "inset 0 0 0 2px var(--link)"));
  };

  const at = (event) => {
    const box = mark.getBoundingClientRect();
    const s = Math.floor((event.clientX - box.left - frame.left) / frame.side);
    const t = Math.floor((event.clientY - box.top - frame.top) / frame.side);
    return s >= 0 && t >= 0 && s < view.columns.length && t < view.rows.length ? { s, t } : null;
  };

  // Pixel x of a width X belongs to cell floor(x * columns / X). This is the first pixel of a cell.
  const begins = (number, cells, pixels) => Math.ceil(number * pixels / cells);
  const unpack = ({ pixels, size: [height, width] }) => {
    const bytes = Uint8Array.from(atob(pixels), (letter) => letter.charCodeAt(0));
    const image = new ImageData(width, height);
    for (let i = 0; i < width * height; i++)
      image.data.set([bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2], 255], 4 * i);
    return image;
  };
  const panel = (source, image, label, weights, most) => {
    const figure = make("figure"), canvas = make("canvas"), [height, width] = source.size, [rows, columns] = source.grid;
    canvas.width = width;
    canvas.height = height;
    const hasAxis = source.extent > 0;
    canvas.style.width = hasAxis ? "min(100%, 40rem)" : Math.max(120, width) + "px";
    canvas.style.height = hasAxis ? "80px" : Math.max(120, width) * height / width + "px";
    if (hasAxis) figure.style.width = "100%";
    const pen = canvas.getContext("2d");
    pen.putImageData(image, 0, 0);
    if (weights) {
      weights.forEach((weight, cell) => {
        const row = Math.floor(cell / columns), column = cell % columns;
        const x = begins(column, columns, width), y = begins(row, rows, height);
        pen.fillStyle = `rgba(214, 0, 147, ${0.7 * weight / most})`;
        pen.fillRect(x, y, begins(column + 1, columns, width) - x, begins(row + 1, rows, height) - y);
      });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `attention of “${blank(label)}”`);
    }
    const time = hasAxis && !weights ? `0 to ${source.extent.toFixed(2)} ${source.across}` : "";
    figure.append(canvas, make("figcaption", weights ? blank(label) : time || "the source"));
    return figure;
  };
  const paintVisualSources = () => {
    $("overlay").hidden = !item.visual_sources.length;
    const map = item.attention ? chosen() : null, rows = map ? entries("row") : [];
    const means = rows.map(([, targets]) => map[0].map((_, s) => sum(targets.map((t) => map[t][s])) / targets.length));
    const most = Math.max(1e-12, ...means.flat()); // one scale for all panels: an ignored source stays pale
    const end = (source) => source.begin + source.grid[0] * source.grid[1];
    const others = item.source_tokens.map((_, s) => s).filter((s) => !item.visual_sources.some((one) => s >= one.begin && s < end(one)));
    $("visual-sources").replaceChildren(...item.visual_sources.flatMap((source) => {
      const image = unpack(source);
      return [panel(source, image, "", null), ...rows.map(([label], row) => panel(source, image, label, means[row].slice(source.begin, end(source)), most))];
    }), ...(item.visual_sources.length && others.length ? rows.map(([label], row) => words(label, others, means[row], most)) : []));
  };
  // The parts of a source that no panel shows, such as the words of a question.
  const words = (label, columns, weights, most) => {
    const figure = make("figure"), line = make("p");
    line.dir = "auto";
    columns.forEach((s) => {
      const word = make("span", blank(item.source_tokens[s]) + " ");
      word.style.backgroundColor = `rgba(214, 0, 147, ${0.7 * weights[s] / most})`;
      word.title = percent(weights[s]);
      line.append(word);
    });
    figure.append(line, make("figcaption", blank(label)));
    return figure;
  };

  const refresh = () => {
    paintVisualSources();
    if (!item.attention) return;
    view = compute();
    cell = null;
    $("range").textContent = $("scaled").checked ? "0 to the largest weight of each row." : "0 to 100 % of each row.";
    paint();
  };

  const options = (select, count, name) => {
    select.replaceChildren(new Option(count > 1 ? "mean of " + count : "the only one", "mean"));
    if (count > 1) for (let i = 0; i < count; i++) select.append(new Option(name + " " + (i + 1), i));
  };

  const show = (number) => {
    item = data.items[number];
    $("example").value = number;
    $("source").textContent = item.source;
    $("output").textContent = item.output;
    $("tokens").replaceChildren(...item.target_tokens.map((token, i) => {
      const entry = make("li"), score = item.token_scores[i];
      entry.append(make("span", blank(token), "token"), make("span", logarithm(score), "score"));
      entry.style.setProperty("--p", probability(score));
      entry.title = percent(probability(score));
      return entry;
    }));
    $("sum").textContent = `Log-probabilities; their sum is ${logarithm(item.score)}, ` +
      `which is a probability of ${percent(probability(item.score))} for the whole output.`;
    $("nbest").replaceChildren(...item.nbest.map(({ text, score }, i) => {
      const row = make("tr"), words = make("td", text), share = make("td"), bar = make("span", "", "bar");
      words.dir = "auto";
      bar.style.setProperty("--p", probability(score));
      share.append(bar, percent(probability(score)));
      row.append(make("td", i + 1), words, make("td", logarithm(score)), share);
      return row;
    }));
    $("model-info").replaceChildren(...Object.entries(item.model_info).flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
    $("alternatives").hidden = !item.nbest.length;
    $("about").hidden = !Object.keys(item.model_info).length;
    $("attention").hidden = !item.attention;
    $("no-attention").hidden = Boolean(item.attention);
    $("no-attention").textContent = item.encoder_only ? "This model has neither attention nor gradients to show."
      : "This decoder does not attend to the source: it gets one fixed vector.";
    $("map-title").textContent = item.attributed ? "Attribution of the output, and self-attention of the encoder" : "Attention";
    if (item.attention) {
      options($("layer"), item.attention.length, "layer");
      options($("head"), item.attention[0].length, "head");
    }
    refresh();
  };

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const scheme = (name) => { root.dataset.scheme = name; if (item) paint(); };
  scheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => scheme(dark.matches ? "dark" : "light"));
  $("scheme").addEventListener("click", () => scheme(root.dataset.scheme === "dark" ? "light" : "dark"));
  $("controls").addEventListener("change", refresh);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  mark.addEventListener("pointermove", (event) => point(at(event)));
  mark.addEventListener("pointerdown", (event) => point(at(event)));
  mark.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(null); });
  mark.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const { s, t } = cell || { s: -move[0], t: -move[1] }; // the first key selects the corner
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
    point({ s: clamp(s + move[0], view.columns.length), t: clamp(t + move[1], view.rows.length) });
  });
  addEventListener("resize", () => item && paint());

  data.items.forEach(({ source }, i) => $("example").append(new Option(`${i + 1}. ${source.length > 60 ? source.slice(0, 59) + "…" : source}`, i)));
  $("choice").hidden = data.items.length < 2;
  const turn = (by) => show((+$("example").value + by + data.items.length) % data.items.length);
  $("example").addEventListener("change", () => show(+$("example").value));
  $("previous").addEventListener("click", () => turn(-1));
  $("next").addEventListener("click", () => turn(1));
  // The word level is useless if a side has only one word.
  if (data.items.some((one) => Math.min(one.source_labels.length, one.target_labels.length) < 2))
    $("controls").elements.level.value = "tokens";
  if (data.items.length) show(0);
  else document.querySelector("main").replaceChildren(make("p", "There is nothing to explain.", "note"));
})();

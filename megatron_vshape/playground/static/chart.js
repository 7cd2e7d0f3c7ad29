// Memory-time frontier: a point per schedule, and a line through the best.

import { digits, element, percent } from "./dom.js";

const HEIGHT = 392;
const EDGE = { left: 56, right: 96, top: 42, bottom: 44 };

/** Return the Pareto front in memory and step time, by memory. */
function paretoOf(points) {
  const sorted = [...points].sort((a, b) => a.peak - b.peak || a.makespan - b.makespan);
  let best = Infinity;
  return sorted.filter((point) => {
    const better = point.makespan < best * (1 - 1e-9);
    if (better) best = point.makespan;
    return better;
  });
}

/** Return the chart; `choose(point)` is called when a point is clicked or entered. */
export function drawChart(points, { width, units, chosen, choose }) {
  const wide = Math.max(300, Math.min(width, 900));
  const chart = element("svg", {
    class: "chart",
    viewBox: `0 0 ${wide} ${HEIGHT}`,
    role: "group",
    "aria-label": "Memory against step time",
  });
  if (!points.length) return chart;
  const most = Math.max(...points.map(({ peak }) => peak)) * 1.06;
  const fastest = Math.min(...points.map(({ makespan }) => makespan));
  const slower = ({ makespan }) => makespan / fastest - 1;
  const known = points.filter(({ source }) => source === "name"); // some plans are much slower
  const worst = Math.max(...(known.length ? known : points).map(slower), 0.01) * 1.08;
  const x = (peak) => EDGE.left + (peak / most) * (wide - EDGE.left - EDGE.right);
  const y = (share) => HEIGHT - EDGE.bottom - (Math.min(share, worst) / worst) * (HEIGHT - EDGE.top - EDGE.bottom);
  drawGrid(chart, { most, worst, x, y, wide, units });
  const front = paretoOf(points);
  drawStaircase(chart, front, x, (point) => y(slower(point)), wide);
  const taken = (point) => ({ left: x(point.peak) - 7, right: x(point.peak) + 7, y: y(slower(point)) + 4 });
  const placed = points.map(taken);
  const ordered = [...points].sort((a, b) => front.includes(b) - front.includes(a));
  for (const point of ordered) {
    const place = { x: x(point.peak), y: y(slower(point)) };
    const above = slower(point) > worst;
    const marked = { front: front.includes(point), chosen: chosen(point), above };
    chart.append(drawPoint(point, place, marked, placed, { units, choose, slower }));
  }
  return chart;
}

function drawGrid(chart, { most, worst, x, y, wide, units }) {
  const line = (x1, y1, x2, y2) => element("line", { class: "grid", x1, y1, x2, y2 });
  for (const share of roundSteps(worst, 6)) {
    const at = y(share);
    chart.append(line(EDGE.left, at, wide - EDGE.right, at));
    chart.append(element("text", { x: EDGE.left - 8, y: at + 4, "text-anchor": "end" }, percent(share)));
  }
  for (const peak of roundSteps(most / units.heldDivisor, wide > 500 ? 9 : 5)) {
    const at = x(peak * units.heldDivisor);
    chart.append(line(at, HEIGHT - EDGE.bottom, at, HEIGHT - EDGE.bottom + 4));
    chart.append(element("text", { x: at, y: HEIGHT - EDGE.bottom + 18, "text-anchor": "middle" }, digits(peak)));
  }
  const name = `peak activations of a device, ${units.heldName}`;
  chart.append(element("text", { x: EDGE.left, y: HEIGHT - 6 }, name));
  chart.append(element("text", { x: 0, y: 11 }, "step time above the fastest"));
}

function roundSteps(most, count) {
  const power = 10 ** Math.floor(Math.log10(most / count));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => most / each <= count);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, at) => at * step);
}

function drawStaircase(chart, front, x, y, wide) {
  if (!front.length) return;
  let path = `M${x(front[0].peak)} ${EDGE.top}`;
  for (const point of front) path += `H${x(point.peak)}V${y(point)}`;
  chart.append(element("path", { class: "line", d: `${path}H${wide - EDGE.right}` }));
}

function drawPoint(point, place, marked, placed, { units, choose, slower }) {
  const plan = point.source === "plan";
  const name = plan ? `plan within ${digits(point.limit)}` : point.title;
  const said = `${name}: ${units.held(point.peak)} ${units.heldName}, step time ${percent(slower(point))} above the fastest`;
  const group = element(
    "g",
    {
      class: "point",
      id: `point-${name}`,
      tabindex: 0,
      role: "button",
      "data-plan": String(plan),
      "data-front": String(marked.front),
      "data-chosen": String(marked.chosen),
      "data-name": plan ? `plan:${point.limit}` : point.name,
      click: () => choose(point),
      keydown: (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        choose(point);
      },
    },
    element("title", {}, said),
    element("circle", { cx: place.x, cy: place.y, r: plan ? 4 : 5.5 }),
  );
  if (!plan) group.append(...labelOf(name, place, placed));
  if (marked.above) group.append(...labelOf(`↑ ${percent(slower(point))}`, place, placed));
  return group;
}

/** Possible label positions next to a point, best first. */
const PLACES = (width) => [
  [9, -8], [10, 18], [12, 4], [-9 - width, -8], [-12 - width, 4], [-9 - width, 18],
  [10, 32], [10, -22], [-9 - width, -22], [-9 - width, 32],
];

/** Return the point's label if it overlaps no other label. */
function labelOf(name, place, placed) {
  const width = name.length * 6.9;
  for (const [dx, dy] of PLACES(width)) {
    const box = { left: place.x + dx, right: place.x + dx + width, y: place.y + dy };
    const free = placed.every(
      (other) => box.left > other.right || box.right < other.left || Math.abs(box.y - other.y) > 13,
    );
    if (!free || box.left < 0 || box.y > HEIGHT - EDGE.bottom - 3) continue; // the axis is there
    placed.push(box);
    return [element("text", { x: box.left, y: box.y, "aria-hidden": "true" }, name)]; // named by its title
  }
  return [];
}

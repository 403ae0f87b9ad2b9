// Figures with their units.

const NONE = "–";

function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

export function count(value) {
  return known(value) ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : NONE;
}

export function number(value, digits = 1) {
  return known(value) ? value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) : NONE;
}

export function perSecond(value) {
  return known(value) ? `${number(value, value < 100 ? 1 : 0)}/s` : NONE;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.0995) return `${number(value * 1000, size < 0.00995 ? 1 : 0)} ms`;
  if (size < 0.9995) return `${number(value * 1000, 0)} ms`;
  if (size < 9.95) return `${number(value, 1)} s`;
  return duration(value);
}

export function duration(value) {
  if (!known(value)) return NONE;
  if (value < 120) return `${number(value, 0)} s`;
  if (value < 7200) return `${number(value / 60, 0)} min`;
  if (value < 172800) return `${number(value / 3600, 1)} h`;
  return `${number(value / 86400, 0)} days`;
}

export function share(value) {
  if (!known(value)) return NONE;
  return `${number(value * 100, value > 0.99 && value < 1 ? 1 : 0)} %`;
}

export function tokens(value) {
  if (!known(value)) return NONE;
  if (value >= 1e9) return `${number(value / 1e9)} G`;
  if (value >= 1e6) return `${number(value / 1e6)} M`;
  if (value >= 1e4) return `${number(value / 1e3)} k`;
  return count(value);
}

export function bytes(value) {
  if (!known(value)) return NONE;
  if (value >= 2 ** 30) return `${number(value / 2 ** 30)} GiB`;
  if (value >= 2 ** 20) return `${number(value / 2 ** 20)} MiB`;
  return `${number(value / 2 ** 10, 0)} KiB`;
}

/** The time of day, with the date unless it is today. */
export function clock(at) {
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString("en-GB");
  return when.toDateString() === new Date().toDateString() ? time : `${when.toLocaleDateString("en-CA")} ${time}`;
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** The end of a replica's id, by which people tell it from its neighbours. */
export function shortId(id) {
  return id.length > 22 ? `…${id.slice(-21)}` : id;
}

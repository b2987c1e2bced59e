// Numbers as people read them.

/** Seconds: "0.4 ms", "85 ms", "1.24 s", "2 min 5 s". */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value < 9.995 ? value.toFixed(2) : value.toFixed(1)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** A rate: "0.52", "7.1", "126". */
export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 1 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value).toString();
}

/** A count with its noun: "1 token", "1,024 tokens". */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** The p-th percentile of sorted numbers, the nearest rank; null of none. */
export function percentile(sorted, p) {
  return sorted.length ? sorted[Math.max(0, Math.ceil((p / 100) * sorted.length) - 1)] : null;
}

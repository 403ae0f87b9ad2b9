// The history of one model for a range, kept up to date by what is new.

import { get } from "./api.js";

export const RANGES = [
  { label: "15 min", span_s: 900, step_s: 2 },
  { label: "1 h", span_s: 3600, step_s: 6 },
  { label: "6 h", span_s: 21600, step_s: 60 },
  { label: "24 h", span_s: 86400, step_s: 180 },
];

export class History {
  constructor(model, range) {
    this.model = model;
    this.range = range;
    this.at = [];
    this.mode = [];
    this.columns = {};
    this.changes = [];
    this.loading = false;
  }

  /** Read what is new since the last row, which may have changed too; returns whether anything was read. */
  async refresh(now) {
    if (this.loading) return false;
    this.loading = true;
    try {
      const since = this.at.length ? this.at[this.at.length - 1] : now - this.range.span_s;
      const query = new URLSearchParams({ model: this.model, since, step_s: this.range.step_s });
      const [found] = await get(`admin/history?${query}`);
      if (found) this.take(found, since, now - this.range.span_s);
      return true;
    } finally {
      this.loading = false;
    }
  }

  take(found, since, oldest) {
    const kept = this.at.findIndex((at) => at >= since);
    const end = kept < 0 ? this.at.length : kept;
    const first = this.at.findIndex((at) => at >= oldest);
    const start = first < 0 ? end : Math.min(first, end);
    const join = (before, after) => before.slice(start, end).concat(after);
    for (const [name, values] of Object.entries(found.columns)) {
      this.columns[name] = join(this.columns[name] ?? [], values);
    }
    this.mode = join(this.mode, found.mode);
    this.at = join(this.at, found.at);
    this.gap();
    this.changes = this.changes.filter((each) => each.at < since && each.at >= oldest).concat(found.changes);
  }

  /** A row without figures where the controller did not run: its log has a decision a minute. */
  gap() {
    const longest = Math.max(90, 3 * this.range.step_s);
    for (let i = this.at.length - 1; i > 0; i -= 1) {
      if (this.at[i] - this.at[i - 1] <= longest) continue;
      this.at.splice(i, 0, this.at[i - 1] + this.range.step_s);
      this.mode.splice(i, 0, "");
      for (const values of Object.values(this.columns)) values.splice(i, 0, null);
    }
  }
}

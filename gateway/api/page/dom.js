// Elements from descriptions, and updates in place, so that focus, selection and scroll positions stay.

/** An element: `attributes` may hold listeners (onclick), `key` for lists, and properties of inputs. */
export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  node.given = attributes ?? {};
  for (const [name, value] of Object.entries(node.given)) set(node, name, value);
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function set(node, name, value) {
  if (name === "key") node.key = value;
  else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
  else if (name.startsWith("on") || name === "value") node[name] = value;
  else if (value === true) node.setAttribute(name, "");
  else if (value === false || value === null || value === undefined) node.removeAttribute(name);
  else node.setAttribute(name, value);
}

/** Make the children of `parent` those of `wanted`; nodes with equal tag and key are updated in place. */
export function patch(parent, ...wanted) {
  patchChildren(parent, wanted.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

function patchChildren(parent, wanted) {
  const keyed = new Map([...parent.childNodes].filter((node) => node.key !== undefined).map((node) => [node.key, node]));
  let at = parent.firstChild;
  for (const next of wanted) {
    const text = !(next instanceof Node);
    const former = !text && next.key !== undefined ? keyed.get(next.key) : at;
    if (former && (text ? former.nodeType === Node.TEXT_NODE : same(former, next))) {
      if (former !== at) parent.insertBefore(former, at);
      else at = at.nextSibling;
      update(former, next);
    } else {
      parent.insertBefore(text ? document.createTextNode(next) : next, at);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function same(former, next) {
  return former.nodeName === next.nodeName && former.key === next.key && !former.own && !next.own;
}

function update(former, next) {
  if (former.nodeType === Node.TEXT_NODE) {
    const text = next instanceof Node ? next.data : String(next);
    if (former.data !== text) former.data = text;
    return;
  }
  const before = former.given ?? {};
  const after = next.given ?? {};
  for (const name of Object.keys(before)) if (!(name in after) && name !== "value") set(former, name, null);
  for (const [name, value] of Object.entries(after)) {
    // What a person has typed or opened stays.
    if (name === "value" || (name === "open" && former.nodeName === "DETAILS")) continue;
    if (value !== before[name] || name.startsWith("on") || name === "style") set(former, name, value);
  }
  former.given = after;
  patchChildren(former, [...next.childNodes]);
}

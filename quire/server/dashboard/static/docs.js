// The page at /docs: /openapi.json, made readable.

import { request } from "./api.js";
import { byId, element } from "./dom.js";

const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = dark ? "dark" : "light";

let schemas = {};

// The schema that a reference names, or the schema itself.
function resolved(schema) {
  return schema.$ref ? (schemas[schema.$ref.split("/").pop()] ?? {}) : schema;
}

// The type of a value in a few words.
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return [...new Set(options.map(typeOf))].join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function fieldTable(title, rows) {
  const table = element("table", "fields");
  const head = element("tr");
  for (const name of [title, "Type", "Default"]) head.append(element("th", "", name));
  table.append(head);
  for (const { name, schema, required } of rows) {
    const row = element("tr");
    const usual = schema.default === undefined ? "" : JSON.stringify(schema.default);
    row.append(element("td", "mono", name), element("td", "muted", typeOf(schema)));
    row.append(element("td", "muted", required ? "required" : usual));
    table.append(row);
  }
  return table;
}

function bodyFields(content) {
  const schema = resolved(Object.values(content)[0]?.schema ?? {});
  const required = schema.required ?? [];
  return Object.entries(schema.properties ?? {}).map(([name, field]) => ({
    name,
    schema: field,
    required: required.includes(name),
  }));
}

function route(path, method, operation) {
  const card = element("details", "card route");
  const line = element("summary");
  line.append(element("b", "mono", `${method.toUpperCase()} ${path}`));
  line.append(element("span", "muted", operation.summary ?? ""));
  card.append(line);
  if (operation.description) card.append(element("p", "note", operation.description));
  const parameters = operation.parameters ?? [];
  if (parameters.length) card.append(fieldTable("Parameter", parameters));
  const fields = bodyFields(operation.requestBody?.content ?? {});
  if (fields.length) card.append(fieldTable("Field of the JSON body", fields));
  const replies = Object.entries(operation.responses ?? {});
  const list = element("ul", "note muted");
  for (const [status, reply] of replies) {
    list.append(element("li", "", `${status}: ${reply.description}`));
  }
  card.append(list);
  return card;
}

function show(problem) {
  const banner = byId("banner");
  banner.textContent = problem;
  banner.hidden = false;
}

try {
  const document = await (await request("openapi.json")).json();
  schemas = document.components?.schemas ?? {};
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      byId("routes").append(route(path, method, operation));
    }
  }
} catch (error) {
  const hint = error.status === 401 ? " Enter a key on the page at / in this tab, then come back." : "";
  show(`${error.message}${hint}`);
}

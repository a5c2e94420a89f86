// Joins the parts of the page.

import { Api } from "./api.js";
import { byId } from "./format.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";

const api = new Api();
const live = new Live(api);
new Playground(api, () => live.refresh());

byId("key").value = api.key;
byId("key").addEventListener("input", (event) => {
  api.key = event.target.value.trim();
});
byId("key").addEventListener("change", () => live.refresh());

live.refresh();

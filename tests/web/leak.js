// Streams that a page reads one after the other, as its test asks.

import { oneAfterTheOther, prepared } from "./faults.js";

const world = await prepared(await (await fetch("/world")).json());
window.reads = (count, transport) => oneAfterTheOther(world, count, transport);

// The names of the models that the edge serves.

import { credentials } from "./api.js";
import { useEffect, useState } from "./ui.js";

/** Interval between requests for the list of models while it is empty. */
const UNSERVED_MS = 2000;

/** Return the names of the models, or null if the edge lists them only for a key.
 * @returns {Promise<string[] | null>}
 */
async function namesOfModels() {
  const asked = { cache: /** @type {const} */ ("no-store"), headers: credentials() };
  const { models } = await (await fetch("/readyz", asked)).json();
  if (models) return models;
  const answer = await fetch("/v1/models", asked);
  return answer.ok ? (await answer.json()).data.map(({ id }) => id) : null;
}

/** Return the names of the models: null before they are known, and if the edge lists them only for a key. */
export function useModels() {
  const [models, setModels] = useState(null);
  useEffect(() => {
    let timer = 0;
    const load = async () => {
      clearTimeout(timer);
      const names = await namesOfModels().catch(() => []);
      setModels(names);
      if (names?.length === 0) timer = setTimeout(load, UNSERVED_MS); // an origin is loading, or is away
    };
    load();
    window.addEventListener("tailrace-key", load);
    return () => {
      clearTimeout(timer);
      window.removeEventListener("tailrace-key", load);
    };
  }, []);
  return models;
}

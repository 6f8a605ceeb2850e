// Random numbers that are the same in every run with the same seed.

/** Return a function that gives numbers from 0 to 1 (xorshift32; Marsaglia, 2003). */
export function seeded(seed) {
  let state = seed * 2_654_435_761 || 1;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
}

export const choose = (random, list) => list[Math.floor(random() * list.length)];

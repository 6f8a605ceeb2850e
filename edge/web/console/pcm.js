// Samples for the input of pipelines: 16-bit little-endian PCM of one channel at 16 kHz.

export const RATE = 16_000;

/** Converts samples of any higher rate to 16-bit samples at RATE: each is the mean of the samples that
 * its time covers, which is enough of a low-pass filter for speech.
 */
export class Downsampler {
  #step;
  #left = 0;
  #sum = 0;
  #count = 0;

  /** @param {number} rate of the samples, in Hz */
  constructor(rate) {
    if (rate < RATE) throw new RangeError(`${rate} Hz is below ${RATE} Hz`);
    this.#step = rate / RATE;
    this.#left = this.#step;
  }

  /** Return the samples that are complete with these ones, each from -1 to 1, as bytes.
   * @param {Float32Array} samples
   */
  feed(samples) {
    const bytes = new Uint8Array(2 * Math.ceil((samples.length + 1) / this.#step));
    const view = new DataView(bytes.buffer);
    let at = 0;
    for (const sample of samples) {
      this.#sum += sample;
      this.#count += 1;
      this.#left -= 1;
      if (this.#left > 0) continue;
      const mean = Math.max(-1, Math.min(1, this.#sum / this.#count));
      view.setInt16(at, Math.round(mean * 32_767), true);
      at += 2;
      this.#left += this.#step;
      this.#sum = this.#count = 0;
    }
    return bytes.subarray(0, at);
  }
}

/** Return the loudest sample of some PCM, from 0 to 1. @param {Uint8Array} pcm */
export function peak(pcm) {
  const view = new DataView(pcm.buffer, pcm.byteOffset, pcm.length);
  let loudest = 0;
  for (let at = 0; at + 1 < pcm.length; at += 2) loudest = Math.max(loudest, Math.abs(view.getInt16(at, true)));
  return loudest / 32_768;
}

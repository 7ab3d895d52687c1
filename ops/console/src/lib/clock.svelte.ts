/** The time, once a second, for ages that go on while nothing else changes. It rests while the page is hidden. */

class Clock {
  now = $state(Date.now());

  constructor() {
    setInterval(() => {
      if (!document.hidden) this.now = Date.now();
    }, 1000);
  }

  /** Unix seconds. */
  get seconds(): number {
    return this.now / 1000;
  }
}

export const ticking = new Clock();

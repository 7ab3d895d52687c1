/** Something a person does that changes the fleet: one at a time, its problem kept until the next try. */
import { Problem } from "../api/client";

export class Action {
  busy = $state(false);
  problem = $state<Problem | null>(null);
  /** What was done last, in words. */
  done = $state("");

  /** Returns whether it succeeded. `done`: what to say then. */
  async run(work: () => Promise<unknown>, done = ""): Promise<boolean> {
    if (this.busy) return false;
    this.busy = true;
    this.problem = null;
    this.done = "";
    try {
      await work();
      this.done = done;
      return true;
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      this.problem = problem;
      return false;
    } finally {
      this.busy = false;
    }
  }
}

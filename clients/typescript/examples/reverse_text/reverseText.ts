/** Text to be written backwards: the example environment of this package. */

import type { TextEnvironment } from "./serving/environment.js";

const NAMES = ["Ann", "Tom", "Eva", "Max", "Ida", "Leo", "Mia", "Ben"];
const VERBS = ["saw", "met", "led", "fed", "hid", "won", "lost", "kept"];
const THINGS = ["a dog", "the sun", "a red fox", "his hat", "the sea", "a song", "her key", "two men"];

/** Twice the length of the longest common subsequence over both lengths: 1 for equal texts, 0 for nothing in common. */
export function similarity(reply: string, answer: string): number {
  const lengths = new Array<number>(answer.length + 1).fill(0);
  for (const character of reply) {
    let diagonal = 0;
    for (let column = 1; column <= answer.length; column += 1) {
      const above = lengths[column] ?? 0;
      lengths[column] = answer[column - 1] === character ? diagonal + 1 : Math.max(above, lengths[column - 1] ?? 0);
      diagonal = above;
    }
  }
  const total = reply.length + answer.length;
  return total ? (2 * (lengths[answer.length] ?? 0)) / total : 1;
}

/** 512 sentences, each to be written backwards; the reward is the similarity to that. */
export function reverseText(name = "reverse_text_ts"): TextEnvironment {
  return {
    name,
    taskset: "typescript-reverse-text",
    numTasks: NAMES.length * VERBS.length * THINGS.length,
    maxTokens: 24,
    task(index) {
      const [who, rest] = [NAMES[index % NAMES.length], Math.floor(index / NAMES.length)];
      const text = `${who} ${VERBS[rest % VERBS.length]} ${THINGS[Math.floor(rest / VERBS.length) % THINGS.length]}.`;
      const answer = [...text].reverse().join("");
      return {
        messages: [
          { role: "system", content: "Reverse the text." },
          { role: "user", content: text },
        ],
        score: (reply) => ({ similarity: similarity(reply, answer) }),
      };
    },
  };
}

/** What an environment is to the service of this package: tasks that one chat turn answers, and a reward for the answer. */

export interface ChatMessage {
  role: "system" | "user" | "assistant" | "tool";
  content: string;
}

export interface Task {
  /** What the model is asked. */
  messages: ChatMessage[];
  /** The parts of the reward of a reply, by name; the reward is their sum. */
  score(reply: string): Record<string, number>;
}

export interface TextEnvironment {
  /** Name that requests use. */
  name: string;
  /** Identifier of the taskset behind it. */
  taskset: string;
  numTasks: number;
  maxTokens: number;
  /** The task at a place from 0 to numTasks - 1; the same task for as long as the server runs. */
  task(index: number): Task;
}

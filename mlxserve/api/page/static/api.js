// The server: requests with the API key, server-sent events, and OpenAI's error objects as exceptions.

const KEY = "mlxserve.key";

// A browser opens six connections to one server. The sixth stays free, or the inside view and new pages would wait
// behind the streams.
export const MAX_STREAMS = 5;

export class ApiError extends Error {
  /** `status` is 0 where there was no answer. */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let askUser = async () => null;
let asking = null;

/** `ask(wrong)` shows a dialog and resolves to a key, or to null when the user declines. */
export function onKeyNeeded(ask) {
  askUser = ask;
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** However many requests are refused at once, the user is asked once. */
async function newKey(refused) {
  if (storedKey() !== refused) return;
  asking ??= askUser(refused !== "").finally(() => (asking = null));
  const key = await asking;
  if (!key) throw new ApiError("This server needs an API key.", 401);
  storeKey(key);
}

async function request(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...options.headers };
    // Header values are bytes; the server compares with the key in UTF-8.
    if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers, credentials: "omit" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError("The server does not answer. Is mlxserve still running?", 0);
    }
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status !== 401) throw new ApiError(message, response.status);
    await newKey(key);
  }
}

async function errorMessage(response) {
  const fallback = `The server answered ${response.status} ${response.statusText}`.trim();
  try {
    return (await response.json()).error.message ?? fallback;
  } catch {
    return fallback;
  }
}

export async function getJson(path, signal) {
  const response = await request(path, { signal, cache: "no-store" });
  return response.json();
}

export async function listModels() {
  return (await getJson("v1/models")).data;
}

/** Yields the chunks of a streamed chat completion; `onSent` is called when the request goes out. Throws ApiError, or the reason of `signal`. */
export async function* streamChat(body, signal, onSent = () => {}) {
  const release = await streamSlot(signal);
  try {
    onSent();
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, timings: true }),
      signal,
    });
    for await (const data of serverSentEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, response.status);
      yield chunk;
    }
    throw new ApiError("The connection ended before the answer did.", 0);
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("The connection to the server broke off.", 0);
  } finally {
    release();
  }
}

/** Yields the data of each event. Of the format only what servers send: data lines, comments, empty lines. */
export async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

let streams = 0;
const waiting = [];

function streamSlot(signal) {
  return new Promise((resolve, reject) => {
    const start = () => {
      signal.removeEventListener("abort", leave);
      streams += 1;
      resolve(() => {
        streams -= 1;
        waiting.shift()?.();
      });
    };
    const leave = () => {
      waiting.splice(waiting.indexOf(start), 1);
      reject(signal.reason);
    };
    if (signal.aborted) reject(signal.reason);
    else if (streams < MAX_STREAMS) start();
    else {
      waiting.push(start);
      signal.addEventListener("abort", leave, { once: true });
    }
  });
}

// A CoAP server (RFC 7252) in Node.js that authenticates each request as Serval's function `coap-auth` does, and answers "done", or 4.01.
// `node coap.js [KEY]`. Follows contract.h. Nothing is allocated for a request that can be kept: the key is set up once, and what is sent
// are copies of the header and constants.
"use strict";
const crypto = require("crypto");
const socket = require("dgram").createSocket({ type: "udp4", recvBufferSize: 4 << 20 });

const KEY = process.argv[2] || "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0-Pw";
const key = crypto.createSecretKey(Buffer.from(KEY, "base64url"));
// {"alg":"HS256","typ":"JWT"}
const HEADER = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.";
const SIGNATURE_CHARS = 43;
const LEEWAY_S = 60;
const DONE = Buffer.from("\xffdone", "latin1");
let messages = 0;

// Where the payload begins, after the options; -1: the message is malformed.
function payloadAt(message) {
  let at = 4 + (message[0] & 15);
  // A delta or a length, of which 13 and 14 announce one and two more bytes.
  const extended = (nibble) => {
    if (nibble < 13) return nibble;
    at += nibble - 12;
    return nibble === 13 ? message[at - 1] + 13 : nibble === 14 ? message.readUInt16BE(at - 2) + 269 : NaN;
  };
  while (at < message.length) {
    const first = message[at++];
    if (first === 0xff) return at;
    extended(first >> 4);
    at += extended(first & 15);
  }
  return -1;
}

// The value of "token" of a CBOR map of texts; undefined: there is none.
function tokenOf(message, start) {
  let at = start;
  const head = () => {
    const small = message[at++] & 31;
    if (small < 24) return small;
    const size = 1 << (small - 24);
    at += size;
    return small > 26 ? NaN : message.readUIntBE(at - size, size);
  };
  if (message[at] >> 5 !== 5) return undefined;
  let token;
  for (let pairs = head(); pairs > 0; pairs--) {
    const keyBytes = head(), keyAt = at;
    at += keyBytes;
    const bytes = head(), valueAt = at;
    at += bytes;
    if (keyBytes === 5 && message.latin1Slice(keyAt, keyAt + 5) === "token") token = message.latin1Slice(valueAt, valueAt + bytes);
  }
  return at === message.length ? token : undefined;
}

function isValid(token) {
  const dot = token.length - SIGNATURE_CHARS - 1;
  if (!token.startsWith(HEADER) || dot < HEADER.length || token[dot] !== ".") return false;
  const computed = crypto.createHmac("sha256", key).update(token.slice(0, dot)).digest();
  const given = Buffer.from(token.slice(dot + 1), "base64url");
  if (given.length !== computed.length || !crypto.timingSafeEqual(given, computed)) return false;
  const { exp, nbf, iat } = JSON.parse(Buffer.from(token.slice(HEADER.length, dot), "base64url"));
  const now = Date.now() / 1000;
  return !(now >= exp + LEEWAY_S) && !(nbf > now + LEEWAY_S) && !(iat > now + LEEWAY_S);
}

function isAllowed(message) {
  try {
    const at = payloadAt(message);
    const token = at < 0 ? undefined : tokenOf(message, at);
    return token !== undefined && isValid(token);
  } catch {
    return false;
  }
}

socket.on("message", (message, from) => {
  if (message.length < 4 || message[0] >> 6 !== 1 || message[1] === 0 || message[1] > 31) return;
  const headerBytes = 4 + (message[0] & 15);
  const allowed = isAllowed(message);
  const answer = Buffer.allocUnsafe(headerBytes + (allowed ? DONE.length : 0));
  message.copy(answer, 0, 0, headerBytes);
  // An acknowledgement with the response, or a response of its own.
  answer[0] = (message[0] & 0x4f) | (message[0] & 0x30 ? 0x10 : 0x20);
  answer[1] = allowed ? 0x45 : 0x81;
  if (allowed) DONE.copy(answer, headerBytes);
  socket.send(answer, from.port, from.address);
  messages++;
});

const end = () => {
  const { user, system } = process.cpuUsage();
  const cpu = (user + system) * 1000;
  console.log(JSON.stringify({ messages, busy_ns: cpu, cpu_ns: cpu }));
  process.exit(0);
};
process.on("SIGTERM", end);
process.on("SIGINT", end);
socket.bind(0, "127.0.0.1", () => console.log(`ready: coap.js udp://127.0.0.1:${socket.address().port}`));

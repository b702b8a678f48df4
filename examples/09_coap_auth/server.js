// A CoAP server (RFC 7252): answers each request with 2.05 and the text "done". Prints its port.
const socket = require("dgram").createSocket("udp4");

socket.on("message", (message, from) => {
  if (message.length < 4 || message[0] >> 6 !== 1 || message[1] === 0 || message[1] > 31) return;
  const tokenBytes = message[0] & 15;
  const isConfirmable = (message[0] >> 4 & 3) === 0;
  // An acknowledgement with the response, or a response of its own.
  const first = 0x40 | (isConfirmable ? 0x20 : 0x10) | tokenBytes;
  const header = Buffer.from([first, 0x45, message[2], message[3]]);
  const token = message.subarray(4, 4 + tokenBytes);
  socket.send(Buffer.concat([header, token, Buffer.from("\xffdone", "latin1")]), from.port, from.address);
});

socket.bind(Number(process.argv[2] || 0), "127.0.0.1", () => console.log(socket.address().port));

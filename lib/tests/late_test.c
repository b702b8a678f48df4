// An answer that comes after its time must not be taken for the next one: late_test FOLDER. Prints
// what is wrong and exits with 1.
static int patience_ms = 60000;
#define PATIENCE_MS patience_ms
#include "functions/ik.c"

#include <sys/wait.h>

// A server that answers the first request, and the second one when the parent says that its time is
// over.
static int serve(int listener, int told) {
    static const char* const answers[] = {"{\"result\":\"created\",\"id\":7}",
                                          "{\"result\":\"done\",\"registers\":{\"high\":1}}"};
    char line[REQUEST_BYTES_MAX];
    int connection = accept(listener, NULL, NULL);
    if (recv(connection, line, sizeof(line), 0) <= 0) return 1;
    if (send(connection, answers[0], strlen(answers[0]), MSG_NOSIGNAL) < 0) return 2;
    if (recv(connection, line, sizeof(line), 0) <= 0) return 3;
    if (read(told, line, 1) != 1) return 4;
    // The client has closed the connection: with a late answer on it, it would take that for the
    // next one.
    if (send(connection, answers[1], strlen(answers[1]), MSG_NOSIGNAL) >= 0) return 5;
    return 0;
}

int main(int argc, char** argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ik* ik = NULL;
    uint64_t value = 0;
    int told[2], status = 1, wrong = 0, listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (argc != 2 || pipe(told) < 0) return 2;
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/late.sock", argv[1]);
    unlink(address.sun_path);
    if (bind(listener, (struct sockaddr*)&address, sizeof(address)) < 0 || listen(listener, 1) < 0)
        return 2;
    pid_t server = fork();
    if (server == 0) _exit(serve(listener, told[0]));
    if (ik_create(address.sun_path, "threshold", "f", NULL, &ik) != 0) return 3;
    ik->attached = 1;
    patience_ms = 100;
    wrong |= ik_command(ik, IK_READ, "high", &value) != -ETIMEDOUT;
    wrong |= 2 * (write(told[1], "", 1) != 1);
    wrong |= 4 * (waitpid(server, &status, 0) != server || status != 0);
    wrong |= 8 * (ik_command(ik, IK_READ, "high", &value) != -ECONNRESET || value == 1);
    ik_destroy(ik);
    unlink(address.sun_path);
    if (wrong) printf("wrong: %d, the server's status %d\n", wrong, status);
    return wrong != 0;
}

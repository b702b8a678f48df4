// Joins the engine at the path given, prints the parameters of its offer, one a line, and leaves.
// Ends with code 1 if it cannot join.
#include <stdio.h>
#include <string.h>

#include <serval/attach.h>

int main(int, char** argv) {
    serval::Runtime runtime;
    if (!runtime.join(argv[1])) {
        printf("%s\n", runtime.why());
        return 1;
    }
    // As a program does whose blocks see other addresses.
    char* copy = new char[runtime.params_bytes() + 1];
    memcpy(copy, runtime.params(), runtime.params_bytes());
    for (uint32_t i = 0; i < runtime.param_count(); i++) {
        serval_param param;
        memcpy(&param, copy + i * sizeof param, sizeof param);
        uint64_t bits;
        memcpy(&bits, &param.value, sizeof bits);
        if (bits >> 48 == SERVAL_PARAM_TEXT >> 48)
            printf("%s \"%s\"\n", reinterpret_cast<const char*>(param.name),
                   copy + static_cast<uint32_t>(bits));
        else
            printf("%s %g\n", reinterpret_cast<const char*>(param.name), param.value);
    }
    delete[] copy;
    runtime.leave();
    return 0;
}

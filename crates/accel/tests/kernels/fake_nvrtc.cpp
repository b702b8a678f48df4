// NVRTC and nvFatbin without a compiler: the code is a line that lists the inputs, so that tests can check the call. A source
// with `refuse` in it is rejected, one with `warn` has a warning. Version 99.0 by default, for sm_80 and sm_90.
#include <stddef.h>

#include <string>

#ifndef VERSION
#define VERSION 99, 0
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Program {
    std::string source, code, ptx, log;
};

int give(const std::string& what, char* to) {
    what.copy(to, what.size());
    return 0;
}
int size_of(const std::string& what, size_t* bytes) {
    *bytes = what.size();
    return 0;
}

}  // namespace

EXPORT const char* nvrtcGetErrorString(int code) { return code == 6 ? "compilation" : "other"; }
EXPORT int nvrtcVersion(int* major, int* minor) {
    const int version[] = {VERSION};
    *major = version[0], *minor = version[1];
    return 0;
}
EXPORT int nvrtcGetNumSupportedArchs(int* count) {
    *count = 2;
    return 0;
}
EXPORT int nvrtcGetSupportedArchs(int* numbers) {
    numbers[0] = 80, numbers[1] = 90;
    return 0;
}
EXPORT int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*, const char* const*) {
    *program = new Program{source, "", "", ""};
    return 0;
}
EXPORT int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}
EXPORT int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    const auto has = [program](const char* word) { return program->source.find(word) != std::string::npos; };
    if (has("warn")) program->log = "a warning\n";
    if (has("refuse")) {
        program->log = has("header") ? "cannot open source file \"x.h\"\n" : "error: refused\n";
        return 6;
    }
    program->code = "code";
    for (int i = 0; i < count; i++) program->code += std::string(" ") + options[i];
    program->ptx = has("none") ? "" : "\n.visible .entry serval_kernel_b(\n.entry serval_kernel_a(\n.func c(\n";
    program->ptx += '\0';
    program->log += '\0';
    return 0;
}
EXPORT int nvrtcGetProgramLogSize(Program* program, size_t* bytes) { return size_of(program->log, bytes); }
EXPORT int nvrtcGetProgramLog(Program* program, char* to) { return give(program->log, to); }
EXPORT int nvrtcGetCUBINSize(Program* program, size_t* bytes) { return size_of(program->code, bytes); }
EXPORT int nvrtcGetCUBIN(Program* program, char* to) { return give(program->code, to); }
EXPORT int nvrtcGetPTXSize(Program* program, size_t* bytes) { return size_of(program->ptx, bytes); }
EXPORT int nvrtcGetPTX(Program* program, char* to) { return give(program->ptx, to); }

EXPORT const char* nvFatbinGetErrorString(int) { return "other"; }
EXPORT int nvFatbinCreate(std::string** pack, const char**, size_t) {
    *pack = new std::string("fatbin");
    return 0;
}
EXPORT int nvFatbinDestroy(std::string** pack) {
    delete *pack;
    *pack = nullptr;
    return 0;
}
EXPORT int nvFatbinAddCubin(std::string* pack, const void* code, size_t bytes, const char* number, const char* name) {
    *pack += std::string("; ") + number + " " + name + " " + std::string(static_cast<const char*>(code), bytes);
    return 0;
}
EXPORT int nvFatbinAddPTX(std::string* pack, const char* ptx, size_t bytes, const char* number, const char*, const char*) {
    *pack += std::string("; PTX ") + number + (ptx[bytes - 1] == 0 ? " ends" : " does not end");
    return 0;
}
EXPORT int nvFatbinSize(std::string* pack, size_t* bytes) { return size_of(*pack, bytes); }
EXPORT int nvFatbinGet(std::string* pack, char* to) { return give(*pack, to); }

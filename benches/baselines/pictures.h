// The committed pictures (device/models/README.md has the formats).
#ifndef SERVAL_BASELINES_PICTURES_H
#define SERVAL_BASELINES_PICTURES_H

#include "../../device/models/faces.h"
#include "contract.h"

struct Pictures {
    uint32_t count = 0;

    // Reads records of `bytes`; `note` if a text precedes the first.
    Pictures(const char* path, const char* magic, size_t bytes, bool note = false) : bytes(bytes) {
        FILE* f = std::fopen(path, "rb");
        if (!f) fail(std::string("read ") + path);
        char start[8];
        uint32_t note_bytes = 0;
        bool whole = std::fread(start, 8, 1, f) == 1 && !memcmp(start, magic, 8) && std::fread(&count, 4, 1, f) == 1 && count > 0;
        if (whole && note) whole = std::fread(&note_bytes, 4, 1, f) == 1 && !std::fseek(f, long(note_bytes), SEEK_CUR);
        if (whole) {
            records.resize(count * bytes);
            whole = std::fread(records.data(), bytes, count, f) == count;
        }
        if (!whole) {
            errno = EINVAL;
            fail(std::string("read ") + path);
        }
        std::fclose(f);
    }
    uint8_t* record(uint64_t i) { return records.data() + i * bytes; }

  private:
    size_t bytes;
    std::vector<uint8_t> records;
};

#endif

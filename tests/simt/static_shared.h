// Where this library keeps its `__shared__` arrays: they are its only thread-local variables, so
// its thread-local storage in the thread that launches.
#pragma once

#include <elf.h>
#include <link.h>

#include <cstddef>

namespace simt {

struct Span {
  unsigned char* data;
  size_t bytes;
};

inline thread_local unsigned char static_shared_anchor;

inline Span static_shared() {
  static_shared_anchor = 0;  // the storage exists from the first touch on
  Span found{};
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* to) {
        auto* const storage = static_cast<unsigned char*>(library->dlpi_tls_data);
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const auto& header = library->dlpi_phdr[i];
          const bool mine = header.p_type == PT_TLS && storage != nullptr &&
                            &static_shared_anchor >= storage &&
                            &static_shared_anchor < storage + header.p_memsz;
          if (mine) *static_cast<Span*>(to) = {storage, header.p_memsz};
        }
        return 0;
      },
      &found);
  return found;
}

}  // namespace simt

// FA_SANITIZED: 1 if a sanitizer watches this program. Such a program cannot count malloc and
// cannot live under a limit on its address space.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FA_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FA_SANITIZED 1
#endif
#endif
#ifndef FA_SANITIZED
#define FA_SANITIZED 0
#endif

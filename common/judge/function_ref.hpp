// What a function is handed to call before it returns. It keeps no copy, as std::function would,
// and compiles in a fraction of the time, which counts where every test case is one.
#pragma once
#include <utility>

namespace fa::judge {

template <class>
class FunctionRef;

template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class F>
  FunctionRef(const F& f)
      : f_(&f), call_([](const void* f_erased, Arguments... arguments) -> Result {
          return static_cast<Result>(
              (*static_cast<const F*>(f_erased))(std::forward<Arguments>(arguments)...));
        }) {}

  Result operator()(Arguments... arguments) const {
    return call_(f_, std::forward<Arguments>(arguments)...);
  }

 private:
  const void* f_;
  Result (*call_)(const void*, Arguments...);
};

}  // namespace fa::judge
